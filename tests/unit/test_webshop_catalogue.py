"""WebShop's files, catalogue, search, goals and splits."""

import gzip
import hashlib
import json
import lzma
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.child import run_python
from tests.unit.webshop_shop import ATTRIBUTES, ITEMS, item, write_shop

pytest.importorskip("bm25s", reason="WebShop needs the extra [webshop]")

from envs.webshop import WebShop, files, store
from envs.webshop.catalogue import open_catalogue
from envs.webshop.files import find_sources, iterate_json
from envs.webshop.generate import generated_products, write_official_files
from envs.webshop.goals import GoalSet
from envs.webshop.index import Index, IndexBuilder, terms
from envs.webshop.product import Product, product_from_raw


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RLLIB_GIGPO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "webshop"


def all_goals(catalogue, kind="synthetic", splits=("train", "test")):
    sets = [GoalSet(catalogue, kind, split) for split in splits]
    return [goals[n] for goals in sets for n in range(len(goals))]


class TestFiles:
    @settings(deadline=None)
    @given(
        st.lists(st.recursive(st.none() | st.text() | st.floats(allow_nan=False), st.lists))
        | st.dictionaries(st.text(), st.lists(st.text() | st.integers()))
    )
    def test_iterate_json_equals_json_at_any_chunk_size(self, tmp_path_factory, content):
        path = tmp_path_factory.mktemp("json") / "content.json"
        wrapped = [[value] for value in content] if isinstance(content, list) else content
        path.write_text(json.dumps(wrapped, indent=1))
        expected = wrapped if isinstance(wrapped, list) else list(wrapped.items())
        for chunk in (1, 7, 1 << 22):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(files, "_CHUNK", chunk)
                assert list(iterate_json(path)) == expected

    @pytest.mark.parametrize("text", ["[[1], [2", '{"a": [1]', "[1] x"[:2], ""])
    def test_cut_off_file_is_named(self, tmp_path, text):
        path = tmp_path / "broken.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=r"broken\.json is cut off"):
            list(iterate_json(path))

    def test_other_json_is_named(self, tmp_path):
        path = tmp_path / "number.json"
        path.write_text("12")
        with pytest.raises(ValueError, match="must hold a JSON list or object"):
            list(iterate_json(path))

    @pytest.mark.parametrize(("ending", "opener"), [(".gz", gzip.open), (".xz", lzma.open)])
    def test_compressed_files(self, tmp_path, ending, opener):
        plain = write_shop(tmp_path)
        packed = tmp_path / "packed"
        packed.mkdir()
        for path in tmp_path.glob("*.json"):
            with opener(packed / (path.name + ending), "wt") as file:
                file.write(path.read_text())
        first, second = open_catalogue(str(plain)), open_catalogue(str(packed))
        assert [first.product(n) for n in range(12)] == [second.product(n) for n in range(12)]

    def test_folder_with_several_items_files(self, tmp_path):
        write_shop(tmp_path, suffix="_5")
        write_shop(tmp_path, suffix="_12")
        with pytest.raises(ValueError, match=r"items_shuffle_12\.json, items_shuffle_5\.json"):
            find_sources(tmp_path, None)
        found = find_sources(tmp_path, 5)
        assert found.items.name == "items_shuffle_5.json"
        assert found.attributes.name == "items_ins_v2_5.json"
        write_shop(tmp_path)
        names = [find_sources(tmp_path, number).items.name for number in (None, 5, 7)]
        assert names == ["items_shuffle.json", "items_shuffle_5.json", "items_shuffle.json"]

    def test_missing_files_are_named(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"no items_shuffle\*\.json in"):
            find_sources(tmp_path / "nowhere", None)
        write_shop(tmp_path)
        (tmp_path / "items_ins_v2.json").unlink()
        with pytest.raises(FileNotFoundError, match=r"attributes file items_ins_v2\.json"):
            find_sources(tmp_path, None)


class TestProducts:
    @pytest.mark.parametrize(
        ("pricing", "tag", "low", "high"),
        [
            ("$9.98 - $16.98", "$9.98 to $16.98", 9.98, 16.98),
            ("$1,050.00", "$1050.0", 1050.0, 1050.0),
            ("", "$100.0", 100.0, 100.0),
            (None, "$100.0", 100.0, 100.0),
            ("$1$2$3", "$1.0 to $2.0", 1.0, 2.0),
        ],
    )
    def test_prices(self, pricing, tag, low, high):
        product = product_from_raw(item("A", pricing=pricing), None)
        assert product is not None
        assert product.price_tag == tag
        assert low <= product.price <= high

    def test_unreadable_price_is_named(self):
        with pytest.raises(ValueError, match=r"product A has the price '\$1\.2\.3'"):
            product_from_raw(item("A", pricing="$1.2.3"), None)

    def test_options_query_and_single_feature(self):
        raw = item(
            "A",
            query=" Sun HATS ",
            small_description="wide",
            customization_options={"Size": [{"value": " M/L "}], "Fit": None},
        )
        product = product_from_raw(raw, None)
        assert product is not None
        assert product.options == {"size": ["m | l"]}
        assert (product.query, product.features) == ("sun hats", ["wide"])
        assert (product.attributes, product.rating) == (["DUMMY_ATTR"], "N.A.")

    def test_unusable_and_repeated_ids_are_left_out(self, tmp_path):
        items = [item("nan"), item("A"), item("A2345678901"), item("A", name="Second"), item("B")]
        catalogue = open_catalogue(str(write_shop(tmp_path, items)))
        assert [catalogue.product(row).asin for row in range(len(catalogue))] == ["A", "B"]
        assert catalogue.product(0).title == "Plain Mug"
        assert [catalogue.row_of(asin) for asin in ("A", "B", "C", "nan", "é")] == [
            0,
            1,
            None,
            None,
            None,
        ]

    def test_no_product_at_all(self, tmp_path):
        with pytest.raises(ValueError, match="no products"):
            open_catalogue(str(write_shop(tmp_path, [])))

    def test_generated_products_do_not_depend_on_their_number(self):
        few, many = list(generated_products(30)), list(generated_products(2000))
        assert many[:30] == few
        assert len({product.asin for product in many}) == 2000
        assert len({product.title for product in many}) > 1990

    def test_generated_products_survive_the_official_format(self, tmp_path):
        write_official_files(tmp_path, 40)
        written = open_catalogue(str(tmp_path))
        made = [Product.from_bytes(product.to_bytes()) for product in generated_products(40)]
        assert [written.product(row) for row in range(40)] == made


class TestCache:
    def test_built_once_and_again_after_a_change(self, tmp_path, cache):
        path = write_shop(tmp_path)
        for _ in range(2):
            open_catalogue.cache_clear()
            assert open_catalogue(str(path)).product(0).title == "Red Clay Mug"
            assert len(list(cache.glob("*/records.bin"))) == 1
        write_shop(tmp_path, [item("B00000RED1", name="Green Mug")])
        open_catalogue.cache_clear()
        assert open_catalogue(str(path)).product(0).title == "Green Mug"

    def test_processes_that_start_together_build_once(self, tmp_path, cache, monkeypatch):
        sources, builds = find_sources(write_shop(tmp_path), None), []
        build = store._build_folder

        def counted(*arguments):
            builds.append(arguments)
            build(*arguments)

        monkeypatch.setattr(store, "_build_folder", counted)
        with ThreadPoolExecutor(8) as pool:
            opened = list(pool.map(lambda _: store.on_disk(sources, None, cache), range(8)))
        assert len(builds) == 1
        assert all(len(arrays["asin_rows"]) == 12 for _, arrays in opened)

    def test_what_a_dead_process_left_is_cleared(self, tmp_path, cache):
        path = str(write_shop(tmp_path))
        open_catalogue(path)
        (folder,) = [entry for entry in cache.iterdir() if entry.is_dir()]
        folder.rename(folder.with_suffix(".building"))
        open_catalogue.cache_clear()
        assert len(open_catalogue(path)) == 12
        assert [entry for entry in cache.iterdir() if entry.is_dir()] == [folder]

    def test_failed_build_leaves_nothing(self, tmp_path, cache):
        path = write_shop(tmp_path, [*ITEMS, item("X", pricing="$1.2.3")])
        with pytest.raises(ValueError, match="product X"):
            open_catalogue(str(path))
        assert [entry for entry in cache.iterdir() if entry.is_dir()] == []

    def test_num_products_takes_the_first(self, tmp_path):
        assert len(open_catalogue(str(write_shop(tmp_path)), 5)) == 5


class TestSearch:
    def test_terms(self):
        assert terms("The Boys' berries, and glass") == terms("boy berry glass")
        assert terms("2.5 oz") != terms("25 oz")
        assert terms("it is of the") == []

    def test_scores_by_hand(self):
        # BM25 as in Lucene, k1 = 0.9, b = 0.4; four documents of 1 + 2 + 1 + 2 = 6 words, 1.5 each.
        builder = IndexBuilder()
        for text in ("red", "red mug", "mug", "blue mug"):
            builder.add(text)
        index = Index(builder.build(), 4)
        # "mug" is in three documents; the shortest (row 2) is first, then rows 1 and 3 tie.
        assert index.search("mug", 10) == [2, 1, 3]
        # "red": idf = ln(1 + (4 - 2 + .5) / (2 + .5)) = 0.693; "mug": ln(1 + 1.5 / 3.5) = 0.357.
        # Lengths 1 and 2: 1 / (1 + .9 (.6 + .4 l / 1.5)) = 0.562 and 0.496.
        # Row 1: 1.050 * 0.496 = 0.520; row 0: 0.693 * 0.562 = 0.389; row 2: 0.357 * 0.562 = 0.200.
        assert index.search("red mug", 10) == [1, 0, 2, 3]
        assert index.search("red mug", 2) == [1, 0]
        assert index.search("green of", 10) == []
        assert index.search("", 10) == []

    def test_ties_come_in_order_at_the_cut(self):
        builder = IndexBuilder()
        for row in range(210):
            builder.add("mug" + " red" * (row % 3))
        index = Index(builder.build(), 210)
        # Shorter documents score higher, so every third row comes first.
        ranked = [*range(0, 210, 3), *range(1, 210, 3), *range(2, 210, 3)]
        assert index.search("mug", 210) == ranked
        assert index.search("mug", 50) == ranked[:50]

    def test_missing_bm25s_names_the_extra(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "bm25s", None)
        with pytest.raises(ImportError, match=r"-e '\.\[webshop\]'"):
            IndexBuilder()

    def test_options_are_searched(self, tmp_path):
        catalogue = open_catalogue(str(write_shop(tmp_path)))
        assert catalogue.search("x-large") == (0,)


class TestGoals:
    def test_every_combination_of_options_is_a_goal(self, tmp_path):
        goals = all_goals(open_catalogue(str(write_shop(tmp_path))))
        mugs = [goal for goal in goals if goal.asin == "B00000RED1"]
        assert sorted(goal.options for goal in mugs) == [
            (("color", color), ("size", size))
            for color in ("red", "sky | blue")
            for size in ("large", "x-large")
        ]
        (teapot,) = [goal for goal in goals if goal.asin == "B00000TEA1"]
        # 1,050 dollars are above all limits: nothing is said about the price.
        assert (teapot.instruction, teapot.price_upper) == ("Find me a heat proof teapot", 1e6)

    def test_price_limit_is_above_the_price(self):
        catalogue = open_catalogue()
        for goal in all_goals(catalogue):
            price = catalogue.product(catalogue.row_of(goal.asin)).price
            # The higher of two of the next four multiples of 10.
            assert price + 10 < goal.price_upper <= price + 40 or goal.price_upper == 1e6
            assert goal.instruction.endswith(f"lower than {goal.price_upper:.2f} dollars")

    def test_equal_goals_are_one(self, tmp_path):
        repeated = [item("A", customization_options={"Size": [{"value": "S"}, {"value": "s"}]})]
        attributes = {"A": {**ATTRIBUTES["B00000RED1"]}}
        catalogue = open_catalogue(str(write_shop(tmp_path, repeated, attributes)))
        assert len(all_goals(catalogue, splits=("train",))) == 1

    def test_splits_are_disjoint_and_complete(self):
        catalogue = open_catalogue()
        train, test = (GoalSet(catalogue, "synthetic", split).ids() for split in ("train", "test"))
        assert not set(train) & set(test)
        assert len(test) == (len(train) + len(test)) // 5
        assert train + test == sorted(train) + sorted(test)
        assert len(set(train)) == len(train)

    def test_large_catalogues_keep_500_for_the_test(self):
        catalogue = open_catalogue("generated", 600)
        assert len(GoalSet(catalogue, "synthetic", "test")) == 500

    def test_find_is_the_inverse_of_ids(self):
        goals = GoalSet(open_catalogue(), "synthetic", "test")
        assert [goals.find(task_id) for task_id in goals.ids()] == list(range(len(goals)))
        other = GoalSet(open_catalogue(), "synthetic", "train").ids()[0]
        assert [goals.find(text) for text in (other, "", "zz", "-1", "f" * 17)] == [None] * 5

    def test_split_without_goals_is_named(self, tmp_path):
        with pytest.raises(
            ValueError, match="has 1 human goals, which leaves none for split='test'"
        ):
            WebShop(products=write_shop(tmp_path), goals="human", split="test")

    def test_ids_are_content(self):
        """Whoever changes these numbers changes every recorded task panel."""
        ids = [WebShop(split=split).task_ids() for split in ("test", "train")]
        assert [len(part) for part in ids] == [329, 1317]
        digest = hashlib.sha256("\n".join(ids[0] + ids[1]).encode()).hexdigest()
        assert (ids[0][0], digest[:16]) == ("0000436fcdd1a76b", "b4fa5ba20158749b")

    def test_another_process_numbers_goals_alike(self):
        code = (
            "from envs.webshop import WebShop\n"
            "env = WebShop()\n"
            "print(*env.task_ids()[:50], *(env.reset(seed=s)[1]['task_id'] for s in range(50)))"
        )
        answer = run_python("-c", code, env={"PYTHONHASHSEED": "99"})
        env = WebShop()
        drawn = [env.reset(seed=seed)[1]["task_id"] for seed in range(50)]
        assert answer.stdout.split() == env.task_ids()[:50] + drawn
        assert len(set(drawn)) > 40
