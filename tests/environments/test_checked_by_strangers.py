"""What is exported is read by the packages whose formats it has, and what they write is read here.

Rollouts of the quickstart's own agent and model, of a tool agent, and of a forked conversation.
"""

from __future__ import annotations

import base64
import json
import runpy
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import openai
import pytest
from recorded_agents import QUESTIONS, TOOL, run_of, said
from rollout_fixtures import rollouts, serving, tokenizer
from test_there_and_back import exported, taught

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.cli.main import DONE, main
from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.reading import read_groups
from sharpen.types import Rollout

__all__ = ["rollouts", "serving", "tokenizer"]
pytestmark = [pytest.mark.environments, pytest.mark.filterwarnings("ignore:langsmith.wrappers:DeprecationWarning")]
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the quickstart's agent, model and problems, of one small step."""
    sys.path.insert(0, str(QUICKSTART))
    agent = runpy.run_path(str(QUICKSTART / "agent.py"))
    sys.path.remove(str(QUICKSTART))
    result = tune(
        workflow_func=agent["run_agent"],
        judge_func=agent["judge"],
        train_dataset=DatasetConfig(path=str(QUICKSTART / "data"), split="train", total_steps=1),
        model=TunerModelConfig(model_path=str(QUICKSTART / "model"), max_model_len=512),
        algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=4, batch_size=4, learning_rate=3e-4),
        settings={"checkpoint_root_dir": str(tmp_path_factory.mktemp("runs")), "check": {"enabled": False}},
    )
    return Path(result.run_dir)


@pytest.fixture
def agents(rollouts: Any, tmp_path: Path) -> Path:
    return run_of(rollouts, tmp_path / "run")


@pytest.fixture(params=["quickstart", "agents"])
def run(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def recorded(run: Path) -> list[Rollout]:
    return [one for group in read_groups(run / "run.db") for one in group.rollouts]


def test_harbors_own_models_and_validator_take_every_trajectory(run: Path, tmp_path: Path) -> None:
    from harbor.models.trajectories import Trajectory
    from harbor.utils.trajectory_validator import TrajectoryValidator

    folder = exported(run, "atif", tmp_path / "trajectories")
    found = sorted(folder.iterdir())
    assert len(found) >= len(recorded(run))
    for path in found:
        validator = TrajectoryValidator()
        assert validator.validate(path), (path, validator.get_errors())
        trajectory = Trajectory.model_validate_json(path.read_text())
        sampled = [step for step in trajectory.steps if step.llm_call_count]
        for step in sampled:
            assert len(step.metrics.logprobs) == len(step.metrics.completion_token_ids)


def test_what_harbor_writes_comes_back(agents: Path, tmp_path: Path) -> None:
    """Its own JSON of what it read, with all that it adds."""
    from harbor.models.trajectories import Trajectory

    folder = tmp_path / "written"
    folder.mkdir()
    for path in exported(agents, "atif", tmp_path / "there").iterdir():
        trajectory = Trajectory.model_validate_json(path.read_text())
        (folder / path.name).write_text(json.dumps(trajectory.to_json_dict()))
    assert main(["record", "import", str(folder), "--dir", str(tmp_path / "back")]) == DONE
    assert taught(tmp_path / "back") == taught(agents)


def test_openenvs_validators_take_every_rollout(run: Path, tmp_path: Path) -> None:
    from openenv.core.harness.capture.graph import RolloutGraph, TurnNode
    from openenv.core.harness.capture.validate import check_rollout, check_sequence, check_turn
    from openenv.core.harness.training import TrainingTrace

    lines = exported(run, "openenv", tmp_path / "turns.jsonl").read_text().splitlines()
    assert len(lines) == len(recorded(run))
    for line in lines:
        trace = TrainingTrace.model_validate_json(line)
        graph = RolloutGraph()
        for turn in trace.turns:
            ids = turn.prompt_token_ids, turn.completion_token_ids, turn.per_token_logps
            assert check_turn(*ids).ok
            graph.add_turn(TurnNode(turn.node_id, *ids, request_messages=turn.request["messages"]))
        assert all(check_sequence(one).ok for one in graph.sequences())
        assert check_rollout(graph).ok


def protobuf(line: str) -> Any:
    """A line of OTLP JSON as Protobuf's own reader takes it: ids are hexadecimal in OTLP, and base64 in Protobuf."""
    from google.protobuf.json_format import ParseDict
    from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

    def based(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            return {key: based(inner, key) for key, inner in value.items()}
        if isinstance(value, list):
            return [based(inner) for inner in value]
        if name in ("traceId", "spanId", "parentSpanId"):
            return base64.b64encode(bytes.fromhex(value)).decode()
        return value

    return ParseDict(based(json.loads(line)), TracesData())


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_spans_are_those_of_opentelemetrys_protocol_and_conventions(run: Path, tmp_path: Path) -> None:
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    operations = {one.value for one in gen_ai_attributes.GenAiOperationNameValues}
    lines = exported(run, "otel", tmp_path / "spans.jsonl").read_text().splitlines()
    for line, rollout in zip(lines, recorded(run), strict=True):
        (resource,) = protobuf(line).resource_spans
        root, *calls = resource.scope_spans[0].spans
        assert len(calls) == len(rollout.calls)
        assert {span.parent_span_id for span in calls} == {root.span_id}
        for span in (root, *calls):
            assert (len(span.trace_id), len(span.span_id)) == (16, 8)
            assert span.end_time_unix_nano >= span.start_time_unix_nano > 0
            found = attributes(span)
            assert {name for name in found if name.startswith("gen_ai.")} <= known
            assert found["gen_ai.operation.name"] in operations


@pytest.fixture
def spans() -> Iterator[Any]:
    """What the OpenAI SDK's own instrumentation notes, with content."""
    from opentelemetry.instrumentation.genai.openai import OpenAIInstrumentor
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", "gen_ai_latest_experimental")
        patch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "SPAN_ONLY")
        OpenAIInstrumentor().instrument(tracer_provider=provider)
        yield exporter
        OpenAIInstrumentor().uninstrument()


def otlp_json(spans: Any) -> dict[str, Any]:
    """Spans of the SDK as OTLP JSON, by its own encoder."""
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    def hexed(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            return {key: hexed(inner, key) for key, inner in value.items()}
        if isinstance(value, list):
            return [hexed(inner) for inner in value]
        if name in ("traceId", "spanId", "parentSpanId"):
            return base64.b64decode(value).hex()
        return value

    return dict(hexed(MessageToDict(encode_spans(spans))))


def words(run: Path) -> list[str]:
    """What each call was asked and what it answered; the instrumentation writes arguments of tools anew."""
    heard = [[*map(dict, call.messages), dict(call.response)] for one in recorded(run) for call in one.calls]
    return sorted(json.dumps(one, sort_keys=True).replace(":  ", ": ") for one in heard)


def test_what_an_instrumented_agent_noted_teaches_what_it_said(spans: Any, rollouts: Any, tmp_path: Path) -> None:
    """The same agents, recorded here and by OpenTelemetry at once."""
    run = run_of(rollouts, tmp_path / "run")
    noted = spans.get_finished_spans()
    assert len(noted) == sum(len(one.calls) for one in recorded(run))
    (tmp_path / "noted.json").write_text(json.dumps(otlp_json(noted)))
    assert main(["record", "import", str(tmp_path / "noted.json"), "--dir", str(tmp_path / "back")]) == DONE
    assert words(tmp_path / "back") == words(run)
    assert any(list(call.tools) == [TOOL] for one in recorded(tmp_path / "back") for call in one.calls)


class Posted:
    """What LangSmith's client sends of runs, put together as its server does."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}

    def close(self) -> None:
        """Close nothing."""

    def mount(self, *_: Any) -> None:
        """Take no adapter."""

    def request(self, method: str, url: str, *, data: Any = None, **_: Any) -> Any:
        """Note a run, or what is further known of it."""
        import requests

        if method in ("POST", "PATCH") and "/runs" in url:
            run = json.loads(data)
            known = self.runs.setdefault(run.get("id") or url.rpartition("/")[2], {})
            known |= {name: value for name, value in run.items() if value is not None}
        answer = requests.Response()
        answer.status_code, answer._content = 200, b"{}"
        return answer


async def said_with_a_tool(client: Any, name: str, question: str) -> None:
    messages: list[Any] = [{"role": "user", "content": question}]
    message = (await client.chat.completions.create(model=name, messages=messages, tools=[TOOL])).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "4"}
    history = [*messages, message.model_dump(exclude_none=True), result]
    await client.chat.completions.create(model=name, messages=history, tools=[TOOL])


def test_what_langsmiths_wrapper_noted_teaches_what_was_said(rollouts: Any, tmp_path: Path) -> None:
    from langsmith import Client, schemas, traceable, tracing_context
    from langsmith.wrappers import wrap_openai

    posted = Posted()
    client = Client(api_url="http://127.0.0.1:1", api_key="k", session=posted, auto_batch_tracing=False, info={})

    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        with tracing_context(enabled=True, client=client):
            wrapped = wrap_openai(openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key))
            await traceable(said_with_a_tool, client=client)(wrapped, model.name, task["question"])
            await wrapped.close()
        return WorkflowOutput(response="", reward=1.0)

    run = recorded_here(rollouts, workflow, tmp_path)
    runs = [schemas.Run(**one) for one in posted.runs.values()]
    assert [one.run_type for one in runs].count("llm") == 4
    (tmp_path / "runs.jsonl").write_text("\n".join(one.model_dump_json() for one in runs))
    assert main(["record", "import", str(tmp_path / "runs.jsonl"), "--dir", str(tmp_path / "back")]) == DONE
    assert words(tmp_path / "back") == words(run)
    assert len(recorded(tmp_path / "back")) == 2


def recorded_here(rollouts: Any, workflow: Any, tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    with Journal(tmp_path / "run" / "run.db") as journal:
        rows = [{"question": question} for question in QUESTIONS]
        for group in rollouts(said).run(workflow, tasks=rows):
            assert [one.error for one in group.rollouts] == [None]
            journal.add(group)
    return tmp_path / "run"


def test_langchains_own_messages_as_langsmith_has_them(tmp_path: Path) -> None:
    from langchain_core.load import dumpd
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
    from langchain_core.outputs import ChatGeneration, LLMResult

    called = AIMessage(content="", tool_calls=[{"name": "add", "args": {"a": 2}, "id": "c1"}])
    begin = [SystemMessage("Be brief."), HumanMessage("2 + 2?"), called, ToolMessage("4", tool_call_id="c1")]
    result = LLMResult(generations=[[ChatGeneration(message=AIMessage("It is 4."))]])
    outputs = json.loads(result.model_dump_json())
    outputs["generations"][0][0]["message"] = dumpd(result.generations[0][0].message)
    run = {"id": "r", "trace_id": "t", "name": "ChatOpenAI", "run_type": "llm", "outputs": outputs}
    run |= {"inputs": {"messages": [[dumpd(one) for one in begin]]}, "start_time": "2025-01-01T00:00:00+00:00"}
    (tmp_path / "run.json").write_text(json.dumps(run))
    assert main(["record", "import", str(tmp_path / "run.json"), "--dir", str(tmp_path / "back")]) == DONE
    (rollout,) = recorded(tmp_path / "back")
    (call,) = rollout.calls
    assert [one["role"] for one in call.messages] == ["system", "user", "assistant", "tool"]
    assert call.messages[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2}'}
    assert call.response == {"role": "assistant", "content": "It is 4."}


def test_what_langfuses_sdk_noted_teaches_what_was_said(rollouts: Any, tmp_path: Path) -> None:
    """Its wrapper of the OpenAI SDK, and rows as the models of its API write them; its server alone is missing."""
    from langfuse import Langfuse
    from langfuse.api import ObservationV2
    from langfuse.openai import AsyncOpenAI
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    langfuse = Langfuse(
        public_key="pk", secret_key="sk", host="http://127.0.0.1:1", tracer_provider=TracerProvider(),
        span_exporter=exporter,
    )  # fmt: skip

    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        async with AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as client:
            with langfuse.start_as_current_observation(name="agent"):
                await said_with_a_tool(client, model.name, task["question"])
        return WorkflowOutput(response="", reward=1.0)

    run = recorded_here(rollouts, workflow, tmp_path)
    langfuse.flush()
    rows: list[Any] = []
    for span in exporter.get_finished_spans():
        about: dict[str, Any] = dict(span.attributes or {})
        start, end = (datetime.fromtimestamp((at or 0) / 1e9, UTC) for at in (span.start_time, span.end_time))
        rows.append(
            ObservationV2(
                id=f"{span.context.span_id:016x}",
                trace_id=f"{span.context.trace_id:032x}",
                project_id="p",
                type=about.get("langfuse.observation.type", "span").upper(),
                name=span.name,
                start_time=start,
                end_time=end,
                input=about.get("langfuse.observation.input"),
                output=about.get("langfuse.observation.output"),
            )
        )
    (tmp_path / "rows.jsonl").write_text("\n".join(row.json() for row in rows))
    assert main(["record", "import", str(tmp_path / "rows.jsonl"), "--dir", str(tmp_path / "back")]) == DONE
    assert words(tmp_path / "back") == words(run)
    assert len(recorded(tmp_path / "back")) == 2
