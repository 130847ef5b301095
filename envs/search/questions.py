"""Where questions come from: the generated world, local files, Hugging Face data sets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from envs.search.passages import Passage
from envs.search.rows import Question, question_digest, question_from_row
from envs.search.world import generated_world
from rllib_gigpo_wire import read_json, read_object

Split = Literal["train", "test", "all"]
SPLITS: tuple[Split, ...] = ("train", "test", "all")

_FLASHRAG = "RUC-NLPIR/FlashRAG_datasets"
BENCHMARKS: dict[str, tuple[str, str]] = {
    name: (_FLASHRAG, config)
    for name, config in {
        "nq": "nq",
        "triviaqa": "triviaqa",
        "popqa": "popqa",
        "hotpotqa": "hotpotqa",
        "2wiki": "2wikimultihopqa",
        "musique": "musique",
        "bamboogle": "bamboogle",
    }.items()
}
"""The seven sets of the paper's Table 2: Hugging Face id and configuration of each."""

# HotpotQA, 2WikiMultihopQA and MuSiQue publish no test answers: their development split is what
# the literature reports, so it serves as the test split where there is no "test".
_PUBLISHED_SPLITS: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "test": ("test", "dev", "validation"),
}
_ONE_TEST_QUESTION_IN = 5


def load_questions(sources: Sequence[str | Question], split: Split) -> tuple[Question, ...]:
    """Read questions and put them into an order that depends on their content alone.

    A source is `"generated"`; a `.jsonl`, `.json` or `.parquet` file; a folder of such files named
    by split (`train.jsonl`, `dev.jsonl`, ...); a name of `BENCHMARKS` in any case; a Hugging Face
    id `"owner/name"` or `"owner/name:configuration"`; or a `Question`. Row layouts: see
    `envs.search.rows.question_from_row`.

    Folders and Hugging Face sets keep their published splits. The generated world, single files
    and `Question` objects have none: every question goes to train or test by a hash of its
    normalised text (one in five to test), so equal questions never fall on both sides, and
    `"all"` takes the whole file, as for evaluation-only sets.

    Args:
        sources: One or more sources, concatenated.
        split: `"train"`, `"test"` or `"all"`.

    Returns:
        The questions in the order of the hash of their text, which is a fixed shuffle that no
        directory order, process or machine changes.

    Raises:
        FileNotFoundError: A source is neither a file, a folder, a known name nor a Hugging Face id.
        ImportError: A Hugging Face source is named and `datasets` is not installed.
        ValueError: A row cannot be read, or a source has no question in this split.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
    return _load(tuple(sources), split)


@lru_cache(maxsize=16)
def _load(sources: tuple[str | Question, ...], split: Split) -> tuple[Question, ...]:
    questions = []
    for source in sources:
        if isinstance(source, Question):
            questions.extend(_split_by_hash([source], split))
            continue
        found = list(_read(source, split))
        if not found:
            raise ValueError(f"{source!r} has no question in split {split!r}")
        questions.extend(found)
    if not questions:
        raise ValueError(f"none of the {len(sources)} questions given falls in split {split!r}")
    keys = {question: (question_digest(question.question), question) for question in questions}
    return tuple(sorted(questions, key=keys.__getitem__))


def pooled_passages(sources: Sequence[str | Question]) -> tuple[Passage, ...]:
    """Collect the distinct passages that the questions of all splits ship, numbered in order.

    Raises:
        ValueError: No question ships a passage.
    """
    distinct = dict.fromkeys(
        (passage.title, passage.text)
        for question in load_questions(sources, "all")
        for passage in question.passages
    )
    if not distinct:
        raise ValueError(
            f"the questions of {list(sources)} ship no passages to search; give corpus=<path of a "
            "JSON lines file with 'id' and 'contents'> or retriever=<URL of a retriever server>"
        )
    return tuple(Passage(str(number), title, text) for number, (title, text) in enumerate(distinct))


def _read(source: str, split: Split) -> Iterable[Question]:
    path = Path(source)
    if source == "generated":
        return _split_by_hash(generated_world().questions, split)
    if path.is_dir():
        return _read_folder(path, split)
    if path.is_file():
        return _split_by_hash(_read_file(path, path.stem), split)
    if source.lower() in BENCHMARKS:
        return _read_hugging_face(*BENCHMARKS[source.lower()], source.lower(), split)
    identifier, _, configuration = source.partition(":")
    if path.suffix in _READERS or identifier.count("/") != 1 or identifier.startswith((".", "/")):
        raise FileNotFoundError(
            f"no questions at {source!r}: expected 'generated', a file ({', '.join(_READERS)}), a "
            f"folder of such files, one of {sorted(BENCHMARKS)}, or a Hugging Face id 'owner/name'"
        )
    name = configuration or identifier.partition("/")[2]
    return _read_hugging_face(identifier, configuration or None, name, split)


def _split_by_hash(questions: Iterable[Question], split: Split) -> Iterator[Question]:
    for question in questions:
        is_test = int(question_digest(question.question)[-8:], 16) % _ONE_TEST_QUESTION_IN == 0
        if split == "all" or is_test == (split == "test"):
            yield question


def _pick_splits(available: Sequence[str], split: Split, source: str) -> list[str]:
    """Choose the published splits that make up `split`."""
    if split == "all":
        return sorted(available)
    for name in _PUBLISHED_SPLITS[split]:
        if name in available:
            return [name]
    raise ValueError(
        f"{source} has the splits {sorted(available)} and none of "
        f"{_PUBLISHED_SPLITS[split]}; ask for another split, or 'all'"
    )


def _read_folder(folder: Path, split: Split) -> Iterator[Question]:
    files = {file.stem: file for file in sorted(folder.iterdir()) if file.suffix in _READERS}
    if not files:
        raise FileNotFoundError(f"{folder} holds no file of type {', '.join(_READERS)}")
    for name in _pick_splits(list(files), split, str(folder)):
        yield from _read_file(files[name], folder.name)


def _read_file(path: Path, data_source: str) -> Iterator[Question]:
    if path.suffix not in _READERS:
        raise ValueError(
            f"cannot read questions from {path}: the file type must be one of {', '.join(_READERS)}"
        )
    for number, row in enumerate(_READERS[path.suffix](path), start=1):
        try:
            yield question_from_row(row, data_source)
        except ValueError as error:
            raise ValueError(f"row {number} of {path}: {error}") from error


def _read_json_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield read_object(line)
            except ValueError as error:
                raise ValueError(f"line {number} of {path} is not JSON: {error}") from error


def _read_json(path: Path) -> list[Mapping[str, Any]]:
    try:
        rows = read_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} must hold a JSON list of rows, got {type(rows).__name__}")
    return rows


def _read_parquet(path: Path) -> list[Mapping[str, Any]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ImportError(f"reading {path} needs the package pyarrow: pip install pyarrow") from (
            error
        )
    return parquet.read_table(path).to_pylist()


_READERS = {".jsonl": _read_json_lines, ".json": _read_json, ".parquet": _read_parquet}


def _read_hugging_face(
    identifier: str, configuration: str | None, data_source: str, split: Split
) -> Iterator[Question]:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"reading {identifier!r} from Hugging Face needs the package datasets: pip install "
            "datasets; or give the path of a downloaded .jsonl or .parquet file"
        ) from error
    available = datasets.get_dataset_split_names(identifier, configuration)
    for name in _pick_splits(available, split, identifier):
        rows = datasets.load_dataset(identifier, configuration, split=name)
        for row in rows:
            yield question_from_row(dict(row), data_source)
