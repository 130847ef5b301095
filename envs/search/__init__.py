"""Search: multi-turn question answering with a search tool, its data and its retrievers."""

from envs.search.client import HttpRetriever
from envs.search.dense import DenseRetriever, Encoder, sentence_encoder, write_embeddings
from envs.search.env import Search
from envs.search.passages import Hit, JsonlCorpus, Passage
from envs.search.questions import BENCHMARKS, load_questions
from envs.search.retrievers import BM25Retriever, Retriever, RetrieverError
from envs.search.rows import Question
from envs.search.sharing import BatchingRetriever, CachedRetriever, shared_retriever
from envs.search.world import generate_world

__all__ = [
    "BENCHMARKS",
    "BM25Retriever",
    "BatchingRetriever",
    "CachedRetriever",
    "DenseRetriever",
    "Encoder",
    "Hit",
    "HttpRetriever",
    "JsonlCorpus",
    "Passage",
    "Question",
    "Retriever",
    "RetrieverError",
    "Search",
    "generate_world",
    "load_questions",
    "sentence_encoder",
    "shared_retriever",
    "write_embeddings",
]
