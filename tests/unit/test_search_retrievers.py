"""BM25 and dense retrieval against brute force; batching, caching, building by name."""

import math
import pickle
import sys
import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.search.dense import DenseRetriever, Encoder, sentence_encoder, write_embeddings
from envs.search.passages import Hit, JsonlCorpus, Passage
from envs.search.retrievers import BM25Retriever, RetrieverError, tokenize, top_indices
from envs.search.sharing import BatchingRetriever, CachedRetriever, shared_retriever
from envs.search.world import generated_world
from tests.missing import skip_or_fail
from tests.shared_data import shared_data

pytest.importorskip("bm25s", reason="needs the extra [search]")


def corpus_of(*texts):
    return [Passage(str(i), "", text) for i, text in enumerate(texts)]


def ids(hits):
    return [hit.passage.id for hit in hits]


def brute_force_bm25(corpus, query, k1, b):
    """Score every passage by Lucene's BM25 as the formula reads, in plain Python."""
    documents = [tokenize(f"{p.title} {p.text}") for p in corpus]
    mean_length = sum(map(len, documents)) / len(documents)
    scores = []
    for words in documents:
        counts = Counter(words)
        score = 0.0
        for word in set(tokenize(query)):
            n = sum(word in document for document in documents)
            idf = math.log(1 + (len(documents) - n + 0.5) / (n + 0.5))
            norm = k1 * (1 - b + b * len(words) / mean_length)
            score += idf * counts[word] / (counts[word] + norm)
        scores.append(score)
    return scores


def test_tokens():
    assert tokenize("The River's mouth, in 1999!") == ["river", "s", "mouth", "1999"]
    assert tokenize("Poznań ÉTÉ") == ["poznan", "ete"]
    assert tokenize("Блиц 東京") == ["блиц", "東京"]
    assert tokenize("what is the") == []


def test_bm25_of_two_passages_by_hand():
    retriever = BM25Retriever(corpus_of("red red fox", "red hen"), k1=1.5, b=0.75)
    # Lengths 3 and 2, mean 2.5. "fox" is in 1 of 2: idf = ln(1 + 1.5/1.5) = ln 2 = .693147;
    # norm of passage 0 = 1.5 * (.25 + .75 * 3/2.5) = 1.725, so the score is .693147/2.725.
    (fox,) = retriever.retrieve(["fox"], 3)
    assert ids(fox) == ["0"]
    assert fox[0].score == pytest.approx(0.2543659)
    # "red" is in both: idf = ln(1 + .5/2.5) = ln 1.2 = .1823216; passage 0 has it twice:
    # .1823216 * 2/3.725 = .0978908; passage 1: norm = 1.5 * (.25 + .75 * 2/2.5) = 1.275,
    # .1823216/2.275 = .0801413.
    (red,) = retriever.retrieve(["red"], 3)
    assert ids(red) == ["0", "1"]
    assert [hit.score for hit in red] == pytest.approx([0.0978908, 0.0801413], abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(
        st.lists(
            st.sampled_from(["fox", "hen", "owl", "red", "blue", "ant"]), min_size=1, max_size=8
        ),
        min_size=1,
        max_size=12,
    ),
    query=st.lists(st.sampled_from(["fox", "hen", "owl", "red", "cat", "the"]), max_size=5),
    topk=st.integers(1, 14),
    k1=st.sampled_from([0.9, 1.5]),
)
def test_bm25_equals_brute_force(texts, query, topk, k1):
    corpus = corpus_of(*(" ".join(words) for words in texts))
    expected = brute_force_bm25(corpus, " ".join(query), k1, 0.4)
    (hits,) = BM25Retriever(corpus, k1=k1, b=0.4).retrieve([" ".join(query)], topk)
    matching = sum(score > 0 for score in expected)
    assert len(hits) == min(topk, matching), "passages without a shared word are not returned"
    best = sorted(expected, reverse=True)[: len(hits)]
    assert [hit.score for hit in hits] == pytest.approx(best, rel=1e-4)
    assert [hit.score for hit in hits] == pytest.approx(
        [expected[int(hit.passage.id)] for hit in hits], rel=1e-4
    )


def test_equal_scores_keep_the_order_of_the_corpus():
    retriever = BM25Retriever(corpus_of(*["ox"] * 50, "hen"))
    assert ids(retriever.retrieve(["ox"], 4)[0]) == ["0", "1", "2", "3"]
    assert retriever.retrieve(["ox ox ox"], 4) == retriever.retrieve(["ox"], 4)


def test_a_query_without_known_words_finds_nothing():
    retriever = BM25Retriever(corpus_of("fox", "hen"))
    assert retriever.retrieve(["owl", "", "the", "!?"], 3) == [[], [], [], []]
    assert retriever.retrieve([], 3) == []


def test_the_title_is_searched_too():
    retriever = BM25Retriever([Passage("0", "Kolm", "a hill"), Passage("1", "Skarn", "a hill")])
    assert ids(retriever.retrieve(["skarn"], 1)[0]) == ["1"]


def test_saved_index_answers_as_the_original(tmp_path):
    corpus = generated_world().passages
    built = BM25Retriever(corpus, k1=0.9, b=0.4)
    built.save(tmp_path / "index")
    queries = ["river born in Zarstead", "The Amber Clock", "zzz", "Poznań lake"]
    for in_memory in (False, True):
        loaded = BM25Retriever.load(tmp_path / "index", corpus, in_memory=in_memory)
        assert loaded.retrieve(queries, 5) == built.retrieve(queries, 5)
    with pytest.raises(ValueError, match="covers 384 passages, the corpus has 10"):
        BM25Retriever.load(tmp_path / "index", corpus[:10])
    with pytest.raises(FileNotFoundError, match="holds no BM25 index"):
        BM25Retriever.load(tmp_path, corpus)


def test_bm25_refuses_what_it_cannot_index(monkeypatch):
    with pytest.raises(ValueError, match="empty corpus"):
        BM25Retriever([])
    with pytest.raises(ValueError, match="none of the 2 passages holds a word"):
        BM25Retriever(corpus_of("the", "!"))
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ImportError, match=r"-e '\.\[search\]'"):
        BM25Retriever(corpus_of("fox"))


@given(
    scores=st.lists(st.integers(-3, 3), min_size=1, max_size=40),
    count=st.integers(1, 45),
)
def test_top_indices_equals_a_stable_sort(scores, count):
    expected = sorted(range(len(scores)), key=lambda i: -scores[i])[:count]
    assert top_indices(np.array(scores, np.float32), count).tolist() == expected


def letter_counts(texts):
    """An encoder without a model: how often each letter occurs."""
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    return [[text.lower().count(letter) for letter in alphabet] for text in texts]


LETTERS = Encoder(letter_counts, batch_size=3)
WORDS = corpus_of("bee", "ant", "tea", "zebra", "eel", "bee")


@pytest.mark.parametrize("per_block", [1, 2, 100])
def test_flat_index_by_hand(monkeypatch, per_block):
    monkeypatch.setattr("envs.search.dense._PASSAGES_PER_BLOCK", per_block)
    retriever = DenseRetriever(WORDS, LETTERS, index="flat")
    # Inner products with "e": bee 2, ant 0, tea 1, zebra 1, eel 2, bee 2; ties in corpus order.
    # With "bz" (b + z): bee 1, zebra 2 (one of each), bee 1, the others 0.
    hits = retriever.retrieve(["e", "bz"], 4)
    assert [ids(found) for found in hits] == [["0", "4", "5", "2"], ["3", "0", "5", "1"]]
    assert [hit.score for hit in hits[0]] == [2, 2, 2, 1]
    assert [hit.score for hit in hits[1]] == [2, 1, 1, 0]
    assert len(retriever.retrieve(["e"], 50)[0]) == 6
    assert retriever.retrieve([], 3) == []


def test_prefixes_and_batches_reach_the_encoder():
    seen = []

    def encode(texts):
        seen.append(list(texts))
        return letter_counts(texts)

    encoder = Encoder(encode, query_prefix="query: ", passage_prefix="passage: ", batch_size=2)
    corpus = [Passage(str(i), f"T{i}", f"text {i}") for i in range(3)]
    DenseRetriever(corpus, encoder, index="flat").retrieve(["q"], 1)
    assert seen == [
        ['passage: "T0"\ntext 0', 'passage: "T1"\ntext 1'],
        ['passage: "T2"\ntext 2'],
        ["query: q"],
    ]


def test_embeddings_on_disk_answer_as_those_in_memory(tmp_path):
    path = tmp_path / "words.npy"
    write_embeddings(path, WORDS, Encoder(letter_counts, batch_size=1))
    in_memory = DenseRetriever(WORDS, LETTERS, index="flat")
    on_disk = DenseRetriever(WORDS, LETTERS, index=str(path))
    assert on_disk.retrieve(["e", "bz"], 4) == in_memory.retrieve(["e", "bz"], 4)
    with pytest.raises(ValueError, match="covers 6 passages, the corpus has 5"):
        DenseRetriever(WORDS[:5], LETTERS, index=str(path))
    with pytest.raises(ValueError, match=r"ending in \.npy"):
        write_embeddings(tmp_path / "words.bin", WORDS, LETTERS)


def test_faiss_index_equals_the_flat_one(tmp_path):
    try:
        import faiss
    except ImportError:
        skip_or_fail("faiss-cpu of the extra [search-dense] is not installed")
    flat = DenseRetriever(WORDS, LETTERS, index="flat")
    built = DenseRetriever(WORDS, LETTERS, index="faiss")
    vectors = np.asarray(LETTERS.passages(WORDS))
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    faiss.write_index(index, str(tmp_path / "words.index"))
    opened = DenseRetriever(WORDS, LETTERS, index=str(tmp_path / "words.index"))
    for query in ("zebra", "tea", "n"):
        (expected,) = flat.retrieve([query], 6)
        for retriever in (built, opened):
            (found,) = retriever.retrieve([query], 6)
            assert [hit.score for hit in found] == [hit.score for hit in expected]
            assert sorted(ids(found)) == sorted(ids(expected))


def test_places_that_an_index_leaves_empty_are_no_passages(monkeypatch):
    retriever = DenseRetriever(WORDS, LETTERS, index="flat")
    # As FAISS answers where the cells that it looks into hold fewer.
    found = np.array([[2.0, -3.4e38]], np.float32), np.array([[4, -1]])
    monkeypatch.setattr(retriever._index, "search", lambda query_qd, topk: found)
    (hits,) = retriever.retrieve(["e"], 2)
    assert ids(hits) == ["4"]


def test_dense_errors(monkeypatch, tmp_path):
    for missing in ("faiss", "sentence_transformers"):
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r"-e '\.\[search-dense\]'.*index='flat'"):
        DenseRetriever(WORDS, LETTERS)
    with pytest.raises(ImportError, match=r"-e '\.\[search-dense\]'"):
        sentence_encoder("intfloat/e5-base-v2")
    with pytest.raises(FileNotFoundError, match="no index file"):
        DenseRetriever(WORDS, LETTERS, index=str(tmp_path / "none.npy"))
    with pytest.raises(ValueError, match="empty corpus"):
        DenseRetriever([], LETTERS, index="flat")
    for wrong in (lambda texts: [1.0] * len(texts), lambda texts: [[math.nan]] * len(texts)):
        with pytest.raises(ValueError, match=r"finite vectors of shape \(6, dimensions\)"):
            DenseRetriever(WORDS, Encoder(wrong), index="flat")
    np.save(tmp_path / "narrow.npy", np.zeros((6, 2), np.float32))
    narrow = DenseRetriever(WORDS, LETTERS, index=str(tmp_path / "narrow.npy"))
    with pytest.raises(ValueError, match="encoder gives 26 dimensions, the index has 2"):
        narrow.retrieve(["e"], 1)


class FakeSentenceTransformer:
    """Stands in for the model; notes how it was called."""

    calls: list = []  # noqa: RUF012

    def __init__(self, model, device):
        self.calls.append((model, device))

    def encode(self, texts, **options):
        self.calls.append((texts, options))
        return letter_counts(texts)


@pytest.mark.parametrize(
    ("model", "prefixes"),
    [
        ("intfloat/e5-base-v2", ("query: ", "passage: ")),
        ("/models/E5-small", ("query: ", "passage: ")),
        ("sentence-transformers/all-MiniLM-L6-v2", ("", "")),
    ],
)
def test_sentence_encoder_knows_the_prefixes_of_e5(monkeypatch, model, prefixes):
    module = type(sys)("sentence_transformers")
    module.SentenceTransformer = FakeSentenceTransformer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)
    FakeSentenceTransformer.calls.clear()
    encoder = sentence_encoder(model, device="cpu", batch_size=5)
    assert (encoder.query_prefix, encoder.passage_prefix) == prefixes
    assert sentence_encoder(model, query_prefix="Q ").query_prefix == "Q "
    encoder.queries(["a"])
    assert FakeSentenceTransformer.calls[0] == (model, "cpu")
    texts, options = FakeSentenceTransformer.calls[-1]
    assert texts == [prefixes[0] + "a"]
    assert options["normalize_embeddings"] is True


class EchoRetriever:
    """Answers each query with passages named after it; notes the batches it was asked."""

    def __init__(self):
        self.batches = []
        self.fails = False

    def retrieve(self, queries, topk):
        self.batches.append((list(queries), topk))
        if self.fails:
            raise RetrieverError("down")
        return [[Hit(Passage(f"{q}{k}", "", q), -float(k)) for k in range(topk)] for q in queries]


class SlowEcho(EchoRetriever):
    """Holds its first call until told to go on."""

    def __init__(self):
        super().__init__()
        self.entered, self.go_on = threading.Event(), threading.Event()

    def retrieve(self, queries, topk):
        self.entered.set()
        assert self.go_on.wait(10)
        return super().retrieve(queries, topk)


def ask_in_threads(batching, slow, requests):
    """Start the first request, queue the others behind it, let them run; return the answers."""
    answers = {}

    def ask(number, queries, topk):
        try:
            answers[number] = [ids(hits) for hits in batching.retrieve(queries, topk)]
        except RetrieverError as error:
            answers[number] = str(error)

    threads = [
        threading.Thread(target=ask, args=(number, *request))
        for number, request in enumerate(requests)
    ]
    threads[0].start()
    assert slow.entered.wait(10)
    for number, thread in enumerate(threads[1:], start=1):
        thread.start()
        while len(batching._waiting) < number:
            thread.join(0.001)
    slow.go_on.set()
    for thread in threads:
        thread.join(10)
    return answers


def test_calls_that_wait_together_become_one_batch():
    slow = SlowEcho()
    requests = [(["a"], 1), (["b", "c"], 2), ([], 1), (["d"], 1)]
    answers = ask_in_threads(BatchingRetriever(slow), slow, requests)
    assert answers == {0: [["a0"]], 1: [["b0", "b1"], ["c0", "c1"]], 2: [], 3: [["d0"]]}
    assert slow.batches == [(["a"], 1), (["b", "c", "d"], 2)]


def test_batches_are_bounded():
    slow = SlowEcho()
    requests = [([letter], 1) for letter in "abcdef"]
    answers = ask_in_threads(BatchingRetriever(slow, max_queries=2), slow, requests)
    assert answers == {i: [[f"{letter}0"]] for i, letter in enumerate("abcdef")}
    assert [queries for queries, _ in slow.batches] == [["a"], ["b", "c"], ["d", "e"], ["f"]]


def test_a_failed_batch_fails_every_caller():
    slow = SlowEcho()
    slow.fails = True
    answers = ask_in_threads(BatchingRetriever(slow), slow, [(["a"], 1), (["b"], 1), (["c"], 1)])
    assert answers == {0: "down", 1: "down", 2: "down"}


def test_cache_asks_for_new_queries_only():
    echo = EchoRetriever()
    cached = CachedRetriever(echo, max_queries=2)
    first = cached.retrieve(["a", "b", "a"], 1)
    assert [ids(hits) for hits in first] == [["a0"], ["b0"], ["a0"]]
    assert [ids(hits) for hits in cached.retrieve(["b"], 1)] == [["b0"]]
    assert echo.batches == [(["a", "b"], 1)]
    cached.retrieve(["b"], 2)  # another number of hits is another question
    cached.retrieve(["b", "a"], 1)  # "a" was the least recently used and is forgotten
    assert echo.batches[1:] == [(["b"], 2), (["a"], 1)]
    cached.retrieve(["a"], 1)[0].clear()
    assert ids(cached.retrieve(["a"], 1)[0]) == ["a0"], "callers get their own lists"


def test_cache_forgets_the_least_recently_used_query():
    echo = EchoRetriever()
    cached = CachedRetriever(echo, max_queries=2)
    for query in ("a", "b", "a", "c", "a", "b"):
        cached.retrieve([query], 1)
    # "a" is used again before "c" comes, so "b" gives way; "a" is never asked twice.
    assert [queries for queries, _ in echo.batches] == [["a"], ["b"], ["c"], ["b"]]


def test_cache_does_not_keep_failures():
    echo = EchoRetriever()
    cached = CachedRetriever(echo)
    echo.fails = True
    with pytest.raises(RetrieverError):
        cached.retrieve(["a"], 1)
    echo.fails = False
    assert ids(cached.retrieve(["a"], 1)[0]) == ["a0"]


def test_named_retrievers_are_built_once_per_process():
    assert shared_retriever("bm25") is shared_retriever("bm25", corpus="generated")
    assert shared_retriever("bm25") is not shared_retriever("bm25", k1=0.9)
    dense = [shared_retriever("dense", encoder=LETTERS, index="flat") for _ in range(2)]
    assert dense[0] is dense[1]
    assert len(dense[0].retrieve(["zebra"], 3)[0]) == 3


def test_named_retriever_of_a_saved_index(tmp_path):
    BM25Retriever(generated_world().passages).save(tmp_path / "index")
    loaded = shared_retriever("bm25", index=str(tmp_path / "index"))
    query = ["The Amber Clock"]
    assert loaded.retrieve(query, 3) == shared_retriever("bm25").retrieve(query, 3)


def test_wrong_names_are_explained():
    with pytest.raises(ValueError, match="'bm25', 'dense' or a URL, got 'bm42'"):
        shared_retriever("bm42")
    with pytest.raises(ValueError, match=r"needs encoder=<.*got None"):
        shared_retriever("dense")
    with pytest.raises(ValueError, match=r"unknown settings .*\['device'\]"):
        shared_retriever("dense", encoder=LETTERS, device="cpu")
    with pytest.raises(FileNotFoundError, match="no corpus file"):
        shared_retriever("bm25", corpus="none.jsonl")


def test_real_corpus_finds_the_supporting_passages():
    path = shared_data("searchqa/corpus_hotpot_musique.jsonl")
    corpus = JsonlCorpus(path)
    retriever = BM25Retriever(corpus)
    found = retriever.retrieve([passage.title for passage in corpus[:200]], 3)
    hits = sum(
        corpus[i].title in {hit.passage.title for hit in found[i]} for i in range(len(found))
    )
    assert hits >= 190, "a passage must be found by its title"
    assert pickle.loads(pickle.dumps(retriever)).retrieve(["Poznan"], 3) == retriever.retrieve(
        ["Poznań"], 3
    )
