from __future__ import annotations

import json
import os
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from plait.lab.simulation.shared_prefixes import SharedPrefix, load_prefixes
from plait.lab.simulation.workload import (
    WorkloadCall,
    generate_calls,
    poisson_arrivals,
    select_working_set,
)

BESIDE = Path(__file__).resolve().parents[4] / "shared" / "traces"
TRACES = Path(os.environ.get("PLAIT_TRACES") or BESIDE)
needs_traces = pytest.mark.skipif(
    not TRACES.is_dir(), reason=f"the recorded workloads are not in {TRACES} (docs/traces.md)"
)

JSON_TYPES = {"string", "integer", "number", "boolean", "array", "object", "null"}
SCHEMA_KEYS = {"type", "description", "enum", "examples", "items", "minimum", "maximum"}


def rendered(messages: list[dict[str, str]], tools: list[dict[str, Any]] | None) -> str:
    """What a chat template makes of a call: tools first, then the messages in order."""
    return json.dumps(tools or []) + "".join(f"<|{message['role']}|>{message['content']}" for message in messages)


def shared_text(prefix: SharedPrefix) -> str:
    return rendered(prefix.messages_for(""), list(prefix.tools))


def characters(prefix: SharedPrefix) -> int:
    return len(shared_text(prefix))


def assert_openai_tool(tool: dict[str, Any]) -> None:
    assert tool.keys() == {"type", "function"}
    assert tool["type"] == "function"
    function = tool["function"]
    assert function.keys() == {"name", "description", "parameters"}
    assert function["name"].replace("_", "a").replace("-", "a").isalnum()
    assert len(function["name"]) <= 64
    parameters = function["parameters"]
    assert parameters.keys() == {"type", "properties", "required"}
    assert parameters["type"] == "object"
    assert set(parameters["required"]) <= parameters["properties"].keys()
    assert len(parameters["required"]) == len(set(parameters["required"]))
    for schema in parameters["properties"].values():
        assert schema.keys() <= SCHEMA_KEYS
        assert schema.get("type", "string") in JSON_TYPES
        assert isinstance(schema.get("examples", []), list)
        assert schema.get("enum", ["any"])


def document(name: str, n_characters: int = 100, questions: tuple[str, ...] = ("What is it?",)) -> SharedPrefix:
    return SharedPrefix(name, "document", "x" * n_characters, (), questions, mean_output_tokens=16)


def tool_list(name: str, n_characters: int = 100) -> SharedPrefix:
    function = {"name": name, "description": "y" * n_characters, "parameters": {"type": "object", "properties": {}}}
    return SharedPrefix(name, "tools", "", ({"type": "function", "function": function},), ("Do it.",), 43)


def size(prefix: SharedPrefix) -> int:
    """The size that `document` and `tool_list` were asked for, standing in for a token count."""
    return len(prefix.text) or len(prefix.tools[0]["function"]["description"])


def write_traces(folder: Path, documents: dict[str, list[dict[str, Any]]], queries: dict[str, Any]) -> None:
    (folder / "loogle").mkdir()
    for name, rows in documents.items():
        (folder / "loogle" / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "toolbench").mkdir()
    (folder / "toolbench" / "toolev_one.json").write_text(json.dumps(queries), encoding="utf-8")


def loogle_row(text: str, *questions: str) -> dict[str, Any]:
    pairs = [{"Q": question, "A": "it's so"} for question in questions]
    return {"input": text, "title": f"About {text}", "qa_pairs": str(pairs), "output": "none"}


def toolbench_tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"name": name, "description": f"Does {name}.", "parameters": {"type": "object", **parameters}}


class TestBuiltinSet:
    def test_is_a_dozen_documents_and_a_dozen_tool_lists_under_names_of_their_own(self) -> None:
        prefixes = load_prefixes(None)
        assert Counter(prefix.kind for prefix in prefixes) == {"document": 12, "tools": 12}
        assert len({prefix.name for prefix in prefixes}) == 24
        assert len({shared_text(prefix) for prefix in prefixes}) == 24

    def test_is_the_same_each_time(self) -> None:
        assert load_prefixes(None) == load_prefixes(None)

    def test_sizes_run_from_about_1000_to_about_6000_tokens(self) -> None:
        for kind, characters_a_token in (("document", 4.6), ("tools", 3.7)):  # measured with cl100k_base
            tokens = [characters(p) / characters_a_token for p in load_prefixes(None) if p.kind == kind]
            assert 900 <= min(tokens) <= 1_300
            assert 5_500 <= max(tokens) <= 6_600
            assert len({round(count / 250) for count in tokens}) >= 10

    def test_documents_are_plain_text_that_answers_the_questions(self) -> None:
        for prefix in load_prefixes(None):
            if prefix.kind == "document":
                assert not set("{}<>") & set(prefix.text)
                assert prefix.text.isascii()
                subjects = [question.split(" the ", 1)[-1] for question in prefix.questions if "service" in question]
                assert all(subject.removesuffix(" need service?") in prefix.text for subject in subjects)
                codes = [q.split("fault code ", 1)[1].split(" ", 1)[0] for q in prefix.questions if "fault code" in q]
                assert all(f"Fault code {code} means" in prefix.text for code in codes)

    def test_tools_are_valid_and_uniquely_named(self) -> None:
        for prefix in load_prefixes(None):
            for tool in prefix.tools:
                assert_openai_tool(tool)
            names = [tool["function"]["name"] for tool in prefix.tools]
            assert len(names) == len(set(names))

    def test_each_is_asked_several_questions(self) -> None:
        assert all(len(set(prefix.questions)) >= 10 for prefix in load_prefixes(None))


class TestLoading:
    def test_a_folder_without_the_data_sets_is_refused_by_what_it_lacks(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"no file loogle/\*\.jsonl and no file toolbench/toolev_\*\.json"):
            load_prefixes(tmp_path)

    def test_one_missing_data_set_is_named_alone(self, tmp_path: Path) -> None:
        write_traces(tmp_path, {"a.jsonl": [loogle_row("rain", "Why?")]}, {})
        (tmp_path / "toolbench" / "toolev_one.json").unlink()
        with pytest.raises(ValueError, match="no file toolbench/toolev") as refusal:
            load_prefixes(tmp_path)
        assert "loogle" not in str(refusal.value).removeprefix(str(tmp_path))

    def test_a_document_in_two_files_is_one_prefix_with_the_questions_of_both(self, tmp_path: Path) -> None:
        rows = [loogle_row("rain", "Why?", "When?"), loogle_row("snow", "Why?")]
        write_traces(tmp_path, {"a.jsonl": rows, "b.jsonl": [loogle_row("rain", "When?", "Where?")]}, {})
        rain, snow = load_prefixes(tmp_path)
        assert (rain.text, rain.questions) == ("rain", ("Why?", "When?", "Where?"))
        assert (snow.text, snow.questions) == ("snow", ("Why?",))
        assert (rain.kind, rain.mean_output_tokens) == ("document", 16)

    def test_tool_lists_that_convert_alike_are_one_prefix_with_the_queries_of_all(self, tmp_path: Path) -> None:
        plain = toolbench_tool("add", properties={"a": {"type": "integer", "description": ""}}, required=["a"])
        marked = toolbench_tool("add", **plain["parameters"], optional=[])
        queries = {
            "1": {"query": "Add 1.", "available_tools": [plain], "answer": {}},
            "2": {"query": "Add 2.", "available_tools": [marked]},
            "3": {"query": "Halve 2.", "available_tools": [toolbench_tool("halve")]},
        }
        write_traces(tmp_path, {"a.jsonl": [loogle_row("rain", "Why?")]}, queries)
        _, add, halve = load_prefixes(tmp_path)
        assert add.questions == ("Add 1.", "Add 2.")
        assert halve.questions == ("Halve 2.",)
        assert (add.kind, add.mean_output_tokens) == ("tools", 43)

    def test_tools_become_openai_tools_with_json_schema_parameters(self, tmp_path: Path) -> None:
        unit = {"type": "string", "description": "C or F", "example_value": "C", "default": None, "optional": True}
        tool = toolbench_tool("warm", properties={"unit": unit, "by": {"type": "ENUM"}}, required=["unit", "gone"])
        queries = {"1": {"query": "Warm up.", "available_tools": [tool]}}
        write_traces(tmp_path, {"a.jsonl": [loogle_row("rain", "Why?")]}, queries)
        schema = {"type": "string", "description": "C or F", "examples": ["C"]}
        parameters = {"type": "object", "properties": {"unit": schema, "by": {}}, "required": ["unit"]}
        _, warm = load_prefixes(tmp_path)
        function = {"name": "warm", "description": "Does warm.", "parameters": parameters}
        assert warm.tools == ({"type": "function", "function": function},)
        assert_openai_tool(warm.tools[0])

    def test_a_name_stands_only_once_in_a_tool_list(self, tmp_path: Path) -> None:
        tools = [toolbench_tool("warm"), toolbench_tool("cool"), toolbench_tool("warm")]
        queries = {"1": {"query": "Warm up.", "available_tools": tools}}
        write_traces(tmp_path, {"a.jsonl": [loogle_row("rain", "Why?")]}, queries)
        _, prefix = load_prefixes(tmp_path)
        assert [tool["function"]["name"] for tool in prefix.tools] == ["warm", "cool"]

    @pytest.mark.parametrize("line", ["{}", "not json", json.dumps({"input": "", "title": "", "qa_pairs": "[{}"})])
    def test_a_damaged_document_is_named_by_file_and_line(self, tmp_path: Path, line: str) -> None:
        write_traces(tmp_path, {"a.jsonl": [loogle_row("rain", "Why?")]}, {})
        path = tmp_path / "loogle" / "a.jsonl"
        path.write_text(path.read_text(encoding="utf-8") + line + "\n", encoding="utf-8")
        with pytest.raises(ValueError, match=r"a\.jsonl, line 2: not a document with questions"):
            load_prefixes(tmp_path)

    def test_a_damaged_tool_file_is_named(self, tmp_path: Path) -> None:
        write_traces(tmp_path, {"a.jsonl": [loogle_row("rain", "Why?")]}, {"1": {"query": 3}})
        with pytest.raises(ValueError, match=r"toolev_one\.json: not a set of queries with their tools"):
            load_prefixes(tmp_path)


class TestWorkingSet:
    PREFIXES = tuple(
        [document(f"d{n}", 9_000 + 1_700 * n) for n in range(8)] + [tool_list(f"t{n}", 300 + 37 * n) for n in range(60)]
    )

    @pytest.mark.parametrize("target", [20_000, 60_000, 120_000])
    @pytest.mark.parametrize("seed", range(5))
    def test_sums_to_the_target_and_mixes_the_kinds(self, target: int, seed: int) -> None:
        chosen = select_working_set(self.PREFIXES, size, target, seed)
        assert sum(map(size, chosen)) == pytest.approx(target, rel=0.03)
        assert {prefix.kind for prefix in chosen} == {"document", "tools"}
        assert chosen == [prefix for prefix in self.PREFIXES if prefix in chosen]

    def test_is_decided_by_the_seed(self) -> None:
        first = select_working_set(self.PREFIXES, size, 60_000, 1)
        assert select_working_set(self.PREFIXES, size, 60_000, 1) == first
        assert select_working_set(self.PREFIXES, size, 60_000, 2) != first

    def test_what_one_kind_cannot_fill_the_other_may(self) -> None:
        prefixes = [*self.PREFIXES[:8], tool_list("t", 500)]
        chosen = select_working_set(prefixes, size, 60_000, 0)
        assert sum(map(size, chosen)) == pytest.approx(60_000, rel=0.05)

    def test_is_everything_when_everything_is_smaller_than_the_target(self) -> None:
        assert select_working_set(self.PREFIXES, size, 10**9, 0) == list(self.PREFIXES)

    def test_is_the_smallest_prefix_when_that_exceeds_the_target(self) -> None:
        assert [prefix.name for prefix in select_working_set(self.PREFIXES, size, 10, 0)] == ["t0"]

    def test_of_nothing_is_nothing(self) -> None:
        assert select_working_set([], size, 1_000, 0) == []

    def test_counts_each_prefix_once(self) -> None:
        counted: Counter[str] = Counter()

        def count(prefix: SharedPrefix) -> int:
            counted[prefix.name] += 1
            return size(prefix)

        select_working_set(self.PREFIXES, count, 60_000, 0)
        assert set(counted.values()) == {1}
        assert len(counted) == len(self.PREFIXES)

    def test_of_the_builtin_set_is_within_tolerance(self) -> None:
        for seed in range(5):
            chosen = select_working_set(load_prefixes(None), characters, 160_000, seed)
            assert sum(map(characters, chosen)) == pytest.approx(160_000, rel=0.03)
            assert {prefix.kind for prefix in chosen} == {"document", "tools"}


class TestCalls:
    def test_are_decided_by_the_seed(self) -> None:
        prefixes = load_prefixes(None)
        assert generate_calls(prefixes, 50, seed=3) == generate_calls(prefixes, 50, seed=3)
        assert generate_calls(prefixes, 50, seed=3) != generate_calls(prefixes, 50, seed=4)

    def test_of_a_longer_run_begin_with_those_of_a_shorter(self) -> None:
        prefixes = load_prefixes(None)
        assert generate_calls(prefixes, 60, seed=3)[:20] == generate_calls(prefixes, 20, seed=3)

    def test_popularity_follows_zipf(self) -> None:
        prefixes = [document(f"d{n}") for n in range(24)]
        counts = [count for _, count in Counter(c.prefix for c in generate_calls(prefixes, 20_000, 5)).most_common()]
        weights = [rank**-1.1 for rank in range(1, 25)]
        for rank in (1, 2, 4, 8, 24):
            assert counts[rank - 1] / 20_000 == pytest.approx(weights[rank - 1] / sum(weights), rel=0.15)

    def test_an_exponent_of_zero_is_uniform(self) -> None:
        prefixes = [document(f"d{n}") for n in range(10)]
        counts = Counter(call.prefix for call in generate_calls(prefixes, 20_000, 5, zipf=0.0))
        assert all(count / 20_000 == pytest.approx(0.1, rel=0.15) for count in counts.values())

    def test_which_prefix_is_popular_is_the_seeds_choice(self) -> None:
        prefixes = [document(f"d{n}") for n in range(24)]
        tops = {Counter(c.prefix for c in generate_calls(prefixes, 500, s)).most_common(1)[0][0] for s in range(10)}
        assert len(tops) >= 4

    def test_calls_on_a_prefix_share_all_of_its_shared_part_and_end_apart(self) -> None:
        prefixes = {prefix.name: prefix for prefix in load_prefixes(None)}
        calls = generate_calls(list(prefixes.values()), 300, seed=1)
        texts = [rendered(call.messages, call.tools) for call in calls]
        for call, text in zip(calls, texts, strict=True):
            assert text.startswith(shared_text(prefixes[call.prefix]))
        assert len(set(texts)) == len(texts)

    def test_a_document_stands_before_the_question(self) -> None:
        prefix = document("d", questions=("What is it?",))
        call = generate_calls([prefix], 1, seed=0)[0]
        assert [message["role"] for message in call.messages] == ["system", "user"]
        assert call.messages[1]["content"].startswith(prefix.text)
        assert "What is it?" in call.messages[1]["content"]
        assert call.tools is None

    def test_a_tool_list_goes_into_tools_and_not_into_the_messages(self) -> None:
        prefix = tool_list("sum")
        call = generate_calls([prefix], 1, seed=0)[0]
        assert call.tools == list(prefix.tools)
        assert prefix.tools[0]["function"]["description"] not in json.dumps(call.messages)
        assert "Do it." in call.messages[1]["content"]

    def test_the_same_question_is_put_in_different_words(self) -> None:
        asked = [call.messages[1]["content"] for call in generate_calls([tool_list("sum")], 1_000, seed=0)]
        assert len(set(asked)) == 1_000
        assert len({text.split("Do it.", 1)[0] for text in asked}) >= 10

    @pytest.mark.parametrize(("prefix", "mean", "deviation"), [(document("d"), 16, 9.9), (tool_list("t"), 43, 16)])
    def test_output_lengths_have_the_mean_and_spread_of_the_data_set(
        self, prefix: SharedPrefix, mean: int, deviation: float
    ) -> None:
        lengths = [call.max_tokens for call in generate_calls([prefix], 5_000, seed=2)]
        assert min(lengths) >= 1
        assert statistics.mean(lengths) == pytest.approx(mean, rel=0.05)
        assert statistics.stdev(lengths) == pytest.approx(deviation, rel=0.15)

    def test_an_output_is_at_least_one_token(self) -> None:
        short = SharedPrefix("d", "document", "text", (), ("Yes or no?",), mean_output_tokens=1)
        assert min(call.max_tokens for call in generate_calls([short], 500, seed=0)) == 1

    def test_need_prefixes_and_these_need_questions(self) -> None:
        with pytest.raises(ValueError, match="no shared prefixes"):
            generate_calls([], 1, seed=0)
        with pytest.raises(ValueError, match="at least one question"):
            document("d", questions=())

    def test_hold_what_a_request_needs(self) -> None:
        call = generate_calls(load_prefixes(None), 1, seed=0)[0]
        assert isinstance(call, WorkloadCall)
        json.dumps({"messages": call.messages, "tools": call.tools, "max_tokens": call.max_tokens})


class TestArrivals:
    def test_ascend_from_above_zero_at_the_rate_asked_for(self) -> None:
        times_s = poisson_arrivals(10_000, rate_per_s=8.0, seed=1)
        gaps_s = [later - earlier for earlier, later in zip([0.0, *times_s], times_s, strict=False)]
        assert min(gaps_s) > 0
        assert statistics.mean(gaps_s) == pytest.approx(1 / 8, rel=0.05)
        assert statistics.stdev(gaps_s) == pytest.approx(1 / 8, rel=0.05)  # exponential: deviation equals mean

    def test_are_decided_by_the_seed_and_scale_with_the_rate(self) -> None:
        times_s = poisson_arrivals(100, 2.0, seed=1)
        assert poisson_arrivals(100, 2.0, seed=1) == times_s
        assert poisson_arrivals(100, 2.0, seed=2) != times_s
        assert poisson_arrivals(100, 4.0, seed=1) == pytest.approx([time_s / 2 for time_s in times_s])

    def test_of_no_calls_are_none(self) -> None:
        assert poisson_arrivals(0, 1.0, seed=0) == []

    @pytest.mark.parametrize("rate_per_s", [0.0, -1.0])
    def test_need_a_rate(self, rate_per_s: float) -> None:
        with pytest.raises(ValueError, match="above 0"):
            poisson_arrivals(1, rate_per_s, seed=0)


@needs_traces
class TestDataSets:
    @pytest.fixture
    def prefixes(self) -> list[SharedPrefix]:
        return load_prefixes(TRACES)

    def test_hold_each_document_and_each_tool_list_once(self, prefixes: list[SharedPrefix]) -> None:
        documents = [prefix for prefix in prefixes if prefix.kind == "document"]
        tool_lists = [prefix for prefix in prefixes if prefix.kind == "tools"]
        assert len(documents) == len({prefix.text for prefix in documents}) == 9  # ten lines, one document in both
        assert len(tool_lists) == len({json.dumps(prefix.tools) for prefix in tool_lists})
        assert sum(len(prefix.questions) for prefix in tool_lists) == 300
        assert len({prefix.name for prefix in prefixes}) == len(prefixes)

    def test_have_valid_tools(self, prefixes: list[SharedPrefix]) -> None:
        for prefix in prefixes:
            for tool in prefix.tools:
                assert_openai_tool(tool)

    def test_give_working_sets_of_the_size_asked_for(self, prefixes: list[SharedPrefix]) -> None:
        for seed in range(3):
            chosen = select_working_set(prefixes, characters, 400_000, seed)
            assert sum(map(characters, chosen)) == pytest.approx(400_000, rel=0.02)
            assert {prefix.kind for prefix in chosen} == {"document", "tools"}

    def test_give_calls_that_share_their_prefix(self, prefixes: list[SharedPrefix]) -> None:
        by_name = {prefix.name: prefix for prefix in prefixes}
        calls = generate_calls(prefixes, 100, seed=0)
        assert all(rendered(c.messages, c.tools).startswith(shared_text(by_name[c.prefix])) for c in calls)

    def test_share_no_text_with_the_builtin_set(self, prefixes: list[SharedPrefix]) -> None:
        builtin = {
            sentence.strip() for p in load_prefixes(None) for sentence in p.text.split(".") if len(sentence) > 30
        }
        assert not [sentence for prefix in prefixes for sentence in builtin if sentence in prefix.text]
