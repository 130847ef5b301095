"""Where Search's questions and passages come from, and how they are split and ordered."""

import hashlib
import json
import pickle
import sys
import types

import pyarrow
import pyarrow.parquet
import pytest

from envs.search.passages import (
    NO_PASSAGES,
    Hit,
    JsonlCorpus,
    Passage,
    format_hits,
    passage_from_document,
    to_contents,
)
from envs.search.questions import load_questions, pooled_passages
from envs.search.rows import Question, question_from_row
from envs.search.world import generate_world, generated_world
from tests.child import run_python
from tests.shared_data import shared_data


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


ROWS = [{"question": f"who is number {i}", "golden_answers": [str(i)]} for i in range(200)]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"id": "test_3", "question": "who sang it", "golden_answers": ["Ann", "Ann B."]},
            Question("who sang it?", ("Ann", "Ann B."), "test_3", "src"),
        ),
        (  # Search-R1's parquet
            {
                "id": "train_0",
                "question": "q?",
                "data_source": "nq",
                "reward_model": {"style": "rule", "ground_truth": {"target": ["x", "y"]}},
            },
            Question("q?", ("x", "y"), "train_0", "nq"),
        ),
        (  # verl-agent's parquet
            {
                "id": 7,
                "env_kwargs": {
                    "question": "q?",
                    "ground_truth": {"target": ["x"]},
                    "data_source": "popqa",
                },
            },
            Question("q?", ("x",), "7", "popqa"),
        ),
        (  # TriviaQA
            {"question_id": "tc_1", "question": "q?", "answer": {"value": "x", "aliases": ["X."]}},
            Question("q?", ("x", "X."), "tc_1", "src"),
        ),
        (  # PopQA
            {"id": 4, "question": "q?", "possible_answers": '["x", "y"]'},
            Question("q?", ("x", "y"), "4", "src"),
        ),
        (  # Bamboogle's sheet
            {"id": "b", "Question": "q?", "Answer": "x"},
            Question("q?", ("x",), "b", "src"),
        ),
        (  # HotpotQA's own file
            {
                "_id": "5a",
                "question": "q?",
                "answer": "x",
                "supporting_facts": [["B", 0], ["A", 1], ["B", 2]],
                "context": [["A", ["One.", " Two."]], ["B", ["Three."]]],
            },
            Question(
                "q?",
                ("x",),
                "5a",
                "src",
                ("B", "A"),
                (Passage("", "A", "One. Two."), Passage("", "B", "Three.")),
            ),
        ),
        (  # HotpotQA on Hugging Face, as FlashRAG nests it
            {
                "id": "dev_1",
                "question": "q?",
                "golden_answers": ["x"],
                "metadata": {
                    "supporting_facts": {"title": ["A"], "sent_id": [0]},
                    "context": {"title": ["A"], "sentences": [["One.", "Two."]]},
                },
            },
            Question("q?", ("x",), "dev_1", "src", ("A",), (Passage("", "A", "One. Two."),)),
        ),
        (  # MuSiQue
            {
                "id": "2hop__1",
                "question": "q?",
                "answer": "x",
                "answer_aliases": ["X", "x"],
                "paragraphs": [
                    {"title": "A", "paragraph_text": "One.", "is_supporting": False},
                    {"title": "B", "paragraph_text": "Two.", "is_supporting": True},
                ],
            },
            Question(
                "q?",
                ("x", "X"),
                "2hop__1",
                "src",
                ("B",),
                (Passage("", "A", "One."), Passage("", "B", "Two.")),
            ),
        ),
    ],
)
def test_row_layouts(row, expected):
    assert question_from_row(row, "src") == expected


def test_a_row_without_id_is_named_by_its_text():
    named = question_from_row({"question": "The Q?", "golden_answers": ["x"]}, "src")
    assert named.id == hashlib.sha256(b"q").hexdigest()[:16]  # "q" is the normalised question
    assert named.task_id == f"src:{named.id}"


@pytest.mark.parametrize(
    "row",
    [{"question": "q?"}, {"golden_answers": ["x"]}, {"question": " ", "golden_answers": ["x"]}]
    + [{"question": "q?", "golden_answers": answers} for answers in ([], [""], None, 3)],
)
def test_a_row_without_question_or_answer_is_refused(row):
    with pytest.raises(ValueError, match="expected a row with 'question' and 'golden_answers'"):
        question_from_row(row, "src")


def test_train_and_test_are_disjoint_and_complete(tmp_path):
    path = write_lines(tmp_path / "numbers.jsonl", ROWS)
    train, test, everything = (load_questions([path], s) for s in ("train", "test", "all"))
    assert set(train) | set(test) == set(everything)
    assert not {q.question for q in train} & {q.question for q in test}
    assert len(everything) == 200
    # One in five by hash: 40 expected of 200, standard deviation sqrt(200 * .2 * .8) = 5.7.
    assert 20 <= len(test) <= 60
    assert {q.data_source for q in everything} == {"numbers"}


def test_order_depends_on_the_text_alone(tmp_path):
    forward = write_lines(tmp_path / "a.jsonl", ROWS)
    backward = write_lines(tmp_path / "b.jsonl", ROWS[::-1])
    questions = [[q.question for q in load_questions([p], "all")] for p in (forward, backward)]
    assert questions[0] == questions[1]
    normalised = [f"who is number {i}" for i in range(200)]
    expected = sorted(normalised, key=lambda text: hashlib.sha256(text.encode()).hexdigest())
    assert questions[0] == [f"{text}?" for text in expected]


def test_equal_questions_fall_on_one_side(tmp_path):
    shouted = [{**row, "question": f"{row['question'].upper()} ?"} for row in ROWS]
    path = write_lines(tmp_path / "double.jsonl", ROWS + shouted)
    train, test = (load_questions([path], split) for split in ("train", "test"))
    assert not {q.golden_answers for q in train} & {q.golden_answers for q in test}
    assert len(train) + len(test) == 400


def test_parquet_and_json_read_as_json_lines_do(tmp_path):
    lines = load_questions([write_lines(tmp_path / "x.jsonl", ROWS[:9])], "all")
    (tmp_path / "x.json").write_text(json.dumps(ROWS[:9]))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[:9]), tmp_path / "x.parquet")
    for name in ("x.json", "x.parquet"):
        assert load_questions([str(tmp_path / name)], "all") == lines


def test_a_folder_keeps_its_published_splits(tmp_path):
    folder = tmp_path / "hotpot"
    folder.mkdir()
    write_lines(folder / "train.jsonl", ROWS[:5])
    write_lines(folder / "dev.jsonl", ROWS[5:8])
    (folder / "README.md").write_text("not data")
    sizes = [len(load_questions([str(folder)], split)) for split in ("train", "test", "all")]
    assert sizes == [5, 3, 8]
    write_lines(folder / "test.jsonl", ROWS[8:10])
    load_questions.__globals__["_load"].cache_clear()
    assert len(load_questions([str(folder)], "test")) == 2, "test is preferred to dev"
    (folder / "train.jsonl").unlink()
    load_questions.__globals__["_load"].cache_clear()
    with pytest.raises(ValueError, match=r"has the splits \['dev', 'test'\]"):
        load_questions([str(folder)], "train")


def fake_datasets(calls):
    module = types.ModuleType("datasets")

    def split_names(path, name):
        return ["train", "dev"]

    def load_dataset(path, name, split):
        calls.append((path, name, split))
        return [{"id": f"{split}_0", "question": f"{path} {name} {split}", "golden_answers": ["x"]}]

    module.get_dataset_split_names = split_names  # type: ignore[attr-defined]
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    return module


def test_hugging_face_names_and_ids(monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, "datasets", fake_datasets(calls))
    (wiki,) = load_questions(["2Wiki"], "test")
    assert (wiki.data_source, wiki.id) == ("2wiki", "dev_0")
    (own,) = load_questions(["owner/set:config"], "train")
    assert own.data_source == "config"
    load_questions(["owner/plain"], "all")
    assert calls == [
        ("RUC-NLPIR/FlashRAG_datasets", "2wikimultihopqa", "dev"),
        ("owner/set", "config", "train"),
        ("owner/plain", None, "dev"),
        ("owner/plain", None, "train"),
    ]


def test_hugging_face_without_datasets_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets"):
        load_questions(["popqa"], "test")


@pytest.mark.parametrize("source", ["missing.jsonl", "./a/b", "a/b/c", "no-such-name", "x/y.json"])
def test_a_source_that_is_nowhere_lists_what_can_be_given(source):
    with pytest.raises(FileNotFoundError, match="'generated', a file"):
        load_questions([source], "all")


def test_errors_name_file_and_row(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question": "q", "golden_answers": ["x"]}\n\n{"question": "q"}\n')
    with pytest.raises(ValueError, match=r"row 2 of .*bad\.jsonl: expected a row"):
        load_questions([str(path)], "all")
    path = tmp_path / "broken.jsonl"
    path.write_text('{"question": "q", "golden_answers": ["x"]}\n{"question": \n')
    with pytest.raises(ValueError, match=r"line 2 of .*broken\.jsonl is not JSON"):
        load_questions([str(path)], "all")
    text = tmp_path / "questions.txt"
    text.write_text("q")
    with pytest.raises(ValueError, match="the file type must be one of"):
        load_questions([str(text)], "all")
    with pytest.raises(ValueError, match="split must be one of"):
        load_questions(["generated"], "dev")  # type: ignore[arg-type]


def test_a_file_that_is_no_utf_8_is_named(tmp_path):
    row = json.dumps(ROWS[0], ensure_ascii=False).encode()
    lines = tmp_path / "latin.jsonl"
    lines.write_bytes(row + b"\n" + b'{"question": "caf\xe9"}\n')
    with pytest.raises(ValueError, match=r"line 2 of .*latin\.jsonl is not JSON: .*can't decode"):
        load_questions([str(lines)], "all")
    whole = tmp_path / "latin.json"
    whole.write_bytes(b'[{"question": "caf\xe9"}]')
    with pytest.raises(ValueError, match=r"latin\.json is not JSON: .*can't decode"):
        load_questions([str(whole)], "all")


def test_passages_are_pooled_once(tmp_path):
    rows = [
        {
            "question": f"q{i}",
            "golden_answers": ["x"],
            "passages": [{"title": "A", "text": "shared"}, {"title": "B", "text": f"own {i}"}],
        }
        for i in range(3)
    ]
    passages = pooled_passages([write_lines(tmp_path / "p.jsonl", rows)])
    assert sorted((p.title, p.text) for p in passages) == [
        ("A", "shared"),
        ("B", "own 0"),
        ("B", "own 1"),
        ("B", "own 2"),
    ]
    assert [p.id for p in passages] == ["0", "1", "2", "3"]
    with pytest.raises(ValueError, match="ship no passages"):
        pooled_passages([write_lines(tmp_path / "none.jsonl", ROWS[:2])])


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"id": 3, "contents": '"Alû"\nA demon.\nMore.'}, Passage("3", "Alû", "A demon.\nMore.")),
        ({"contents": "Bare title\ntext"}, Passage("9", "Bare title", "text")),
        ({"contents": "one line"}, Passage("9", "", "one line")),
        ({"contents": '"\ntext'}, Passage("9", '"', "text")),
        ({"title": "T", "text": "text"}, Passage("9", "T", "text")),
    ],
)
def test_documents(document, expected):
    assert passage_from_document(document, fallback_id="9") == expected


@pytest.mark.parametrize("document", [{}, {"contents": 3}, {"title": "T"}, "text", None, []])
def test_other_documents_are_refused(document):
    with pytest.raises(ValueError, match="expected a document"):
        passage_from_document(document)


def test_contents_round_trip():
    passage = Passage("1", 'The "Heroes" album', "First.\nSecond.")
    assert passage_from_document({"id": "1", "contents": to_contents(passage)}) == passage


def test_hits_are_numbered_one_a_line():
    hits = [Hit(Passage("0", "A", "one\ntwo  three"), 2.0), Hit(Passage("1", "B", "four"), 1.0)]
    assert format_hits(hits) == 'Doc 1 (Title: "A") one two three\nDoc 2 (Title: "B") four'
    assert format_hits([]) == NO_PASSAGES


def test_corpus_file_is_read_in_place(tmp_path, monkeypatch):
    monkeypatch.setattr("envs.search.passages._SCAN_BYTES", 7)  # lines span several scans
    passages = [Passage(str(i), f"T{i}", f"text ü {i}") for i in range(5)]
    lines = [json.dumps({"id": p.id, "contents": to_contents(p)}) for p in passages]
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join([*lines[:2], "", *lines[2:]]), encoding="utf-8")  # no last newline
    corpus = JsonlCorpus(path)
    assert list(corpus) == passages
    assert corpus[-1] == passages[-1]
    assert corpus[1:3] == passages[1:3]
    assert list(pickle.loads(pickle.dumps(corpus))) == passages
    with pytest.raises(IndexError):
        corpus[5]
    path.write_bytes(b"\r\n".join(line.encode() for line in lines) + b"\r\n\r\n")
    assert list(JsonlCorpus(path)) == passages


def test_corpus_file_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="no corpus file"):
        JsonlCorpus(tmp_path / "none.jsonl")
    for name, content, message in [
        ("empty.jsonl", "", "is empty"),
        ("blank.jsonl", "\n\n", "blank lines only"),
        ("c.jsonl.gz", "x", "is compressed"),
        ("bad.jsonl", '{"text": 3}\n', "document 0 of .*expected a document"),
    ]:
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=message):
            JsonlCorpus(tmp_path / name)
    (tmp_path / "late.jsonl").write_text('{"text": "fine"}\nnot json\n')
    with pytest.raises(ValueError, match=r"document 1 of .*late\.jsonl"):
        JsonlCorpus(tmp_path / "late.jsonl")[1]


def test_generated_world_is_consistent():
    world = generated_world()
    titles = [p.title for p in world.passages]
    texts = dict(zip(titles, (p.text for p in world.passages), strict=True))
    assert len(texts) == len(titles) == 24 + 60 + 150 + 150
    assert len({q.question for q in world.questions}) == len(world.questions)
    assert len({q.id for q in world.questions}) == len(world.questions)
    assert {q.data_source for q in world.questions} == {"one_hop", "two_hop"}
    for question in world.questions:
        hops = [texts[title] for title in question.supporting_titles]
        assert len(hops) == {"one_hop": 1, "two_hop": 2}[question.data_source]
        assert question.golden_answers[0] in hops[-1], "the last passage holds the answer"
        assert question.supporting_titles[0] in question.question
        if len(hops) == 2:
            assert question.supporting_titles[1] in hops[0], "each hop names the next"
            assert question.supporting_titles[1] not in question.question


def test_worlds_differ_by_seed_and_check_their_sizes():
    sizes = {"rivers": 2, "towns": 3, "people": 12, "works": 4}
    small = generate_world(**sizes)
    assert len(small.passages) == 21
    assert small == generate_world(**sizes)
    assert small != generate_world(seed=1, **sizes)
    with pytest.raises(ValueError, match=r"asked for 25 names .* 1 to 24 exist"):
        generate_world(rivers=25)


def test_generated_world_is_the_same_in_another_process():
    code = (
        "import hashlib; from envs.search.questions import load_questions\n"
        "from envs.search.world import generated_world\n"
        "text = repr((generated_world(), load_questions(['generated'], 'train')))\n"
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    digests = {run_python("-c", code, env={"PYTHONHASHSEED": seed}).stdout for seed in ("1", "2")}
    text = repr((generated_world(), load_questions(["generated"], "train")))
    assert digests == {hashlib.sha256(text.encode()).hexdigest() + "\n"}


@pytest.mark.parametrize(
    ("name", "count", "passages"),
    [
        ("bamboogle.jsonl", 125, False),
        ("nq_test_1000.jsonl", 1000, False),
        ("hotpotqa_train100_passages.jsonl", 100, True),
        ("musique_train100_passages.jsonl", 100, True),
    ],
)
def test_real_question_files(name, count, passages):
    path = str(shared_data(f"searchqa/{name}"))
    questions = load_questions([path], "all")
    assert len(questions) == count
    assert all(q.question.endswith("?") and q.golden_answers for q in questions)
    if passages:
        for question in questions:
            assert set(question.supporting_titles) <= {p.title for p in question.passages}


def test_real_corpus_file_holds_the_pooled_passages():
    names = ("hotpotqa_train100_passages.jsonl", "musique_train100_passages.jsonl")
    pooled = pooled_passages([str(shared_data(f"searchqa/{name}")) for name in names])
    corpus = JsonlCorpus(shared_data("searchqa/corpus_hotpot_musique.jsonl"))
    assert {(p.title, p.text) for p in pooled} <= {(p.title, p.text) for p in corpus}
