"""Trackers log a run's scalars, continue after a resumption, and never stop the run."""

import math
import os
import socket
import struct
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from stretto.errors import ConfigError
from stretto.telemetry.events import (
    CheckpointSaved,
    DataRead,
    EvalDone,
    RunEnded,
    RunStarted,
    StepDone,
    ThroughputFactors,
)
from stretto.telemetry.tracker_backends import flatten_settings, scalars
from stretto.telemetry.trackers import (
    TRACKERS,
    check_trackers,
    open_trackers,
    set_tracker_environment,
)

SETTINGS = {"run.seed": 7, "optim.lr": 0.1, "strategy.bucket_lengths": [2, 3], "run.threads": None}
STARTED = RunStarted("r", 2, 1, "allreduce", 4, "cnn", 10, 1)
EVAL = EvalDone(2, 0, 0.5, 0.75)
ENDED = RunEnded(4, 9.0, 0.25, 0.875, 100.0, ThroughputFactors(30.0, 4, 0.75))

TRACKER_VARIABLES = {name for tracker in TRACKERS.values() for name in tracker.environment}


def step(number: int, loss: float = 1.0) -> StepDone:
    return StepDone(number, 0, loss, 0.1, 64.0, 0.5, 0.7, 0.2, 0.1, 3.0)


@pytest.fixture(autouse=True)
def local_trackers(monkeypatch, tmp_path):
    """Remove the user's tracker settings, so that everything is written below the folder."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    chosen = {"HOME": str(tmp_path / "home")}
    set_tracker_environment(list(TRACKERS), chosen)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)


def run_python(code, folder):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name not in TRACKER_VARIABLES},
        timeout=60,
    )


def track(name, run_dir, *events, resumed=False, settings=SETTINGS):
    said = []
    (sink,) = open_trackers([name], run_dir, "r", settings, resumed=resumed, log_line=said.append)
    for event in events:
        sink(event)
    sink.close()
    return said


# Scalars and settings


def test_a_step_has_loss_rate_speed_and_shares():
    logged = scalars(step(3, loss=2.5))
    assert logged.step == 3
    assert logged.values == {
        "train/loss": 2.5,
        "train/lr": 0.1,
        "speed/samples_per_s": 64.0,
        "speed/step_s": 0.5,
        "share/compute": 0.7,
        "share/communication": 0.2,
        "share/data": 0.1,
    }


def test_a_step_has_the_consensus_distance_if_measured():
    assert scalars(replace(step(3), consensus_distance=0.25)).values["train/apart"] == 0.25


def test_an_evaluation_without_accuracy_logs_none():
    assert scalars(EvalDone(2, 0, 0.5, None)).values == {"eval/loss": 0.5}


def test_a_data_event_has_counts():
    read = scalars(DataRead(5, 0, decoded=8, cached=2, skipped=1, files=["a"]))
    assert read.values == {"data/decoded": 8.0, "data/cached": 2.0, "data/skipped": 1.0}


@pytest.mark.parametrize("event", [STARTED, CheckpointSaved(2, "p", 10, 0.1)])
def test_an_event_without_numbers_has_no_scalars(event):
    assert scalars(event) is None


def test_lists_and_none_in_settings_become_json_text():
    assert flatten_settings(SETTINGS) == {
        "run.seed": 7,
        "optim.lr": 0.1,
        "strategy.bucket_lengths": "[2, 3]",
        "run.threads": "null",
    }


# Names that are refused


def test_a_misspelt_tracker_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        check_trackers(["tensorbord"])


def test_an_unknown_tracker_is_refused_with_all_names():
    with pytest.raises(ConfigError, match="known are tensorboard, wandb, mlflow"):
        check_trackers(["xyz"])


def test_a_tracker_named_twice_is_refused():
    with pytest.raises(ConfigError, match="'wandb' is named twice"):
        check_trackers(["wandb", "wandb"])


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_refused_with_the_extra_to_install(name, monkeypatch):
    monkeypatch.setattr("stretto.telemetry.trackers.find_spec", lambda _package: None)
    with pytest.raises(ConfigError, match=rf'pip install "stretto\[{name}\]"'):
        check_trackers([name])


def test_checking_imports_no_tracker():
    code = (
        "import sys; from stretto.telemetry.trackers import TRACKERS, check_trackers;"
        "check_trackers(list(TRACKERS));"
        "sys.exit(bool({'wandb', 'mlflow', 'tensorboard', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Environment and network


def test_variables_that_the_user_set_are_kept():
    environ = {"WANDB_ERROR_REPORTING": "true"}
    set_tracker_environment(["wandb", "mlflow"], environ)
    assert environ["WANDB_ERROR_REPORTING"] == "true"
    assert environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


def test_only_variables_of_trackers_in_use_are_set():
    environ = {}
    set_tracker_environment(["tensorboard"], environ)
    assert environ == {}


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_resolves_no_other_host(name, tmp_path):
    code = f"""
    import os, socket, sys
    from pathlib import Path
    from stretto.telemetry.events import RunEnded, StepDone
    from stretto.telemetry.trackers import set_tracker_environment, open_trackers

    def look_up(host, *rest, find=socket.getaddrinfo, **more):
        if host not in ("localhost", "127.0.0.1"):
            print(host, flush=True)
        return find(host, *rest, **more)

    socket.getaddrinfo = look_up
    for testing in ("PYTEST_CURRENT_TEST", "CI"):  # MLflow sends nothing under tests
        os.environ.pop(testing, None)
    set_tracker_environment([{name!r}], os.environ)
    (sink,) = open_trackers([{name!r}], Path.cwd(), "r", {{}}, resumed=False, log_line=sys.exit)
    sink(StepDone(1, 0, 1.0, 0.1, 64.0, 0.5, 0.7, 0.2, 0.1, 3.0))
    sink(RunEnded(4, 9.0, 0.25, 0.875, 100.0))
    sink.close()
    """
    done = run_python(code, tmp_path)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr


# Logged data


def tensorboard_scalars(run_dir, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run_dir / "tensorboard"))
    read.Reload()
    return [(entry.step, entry.value) for entry in read.Scalars(name)]


def test_tensorboard_reads_back_what_was_logged(tmp_path):
    assert track("tensorboard", tmp_path, STARTED, step(2), EVAL, step(4, math.nan), ENDED) == []
    (first, second) = tensorboard_scalars(tmp_path, "train/loss")
    assert first == (2, 1.0)
    assert second[0] == 4
    assert math.isnan(second[1])
    assert tensorboard_scalars(tmp_path, "eval/accuracy") == [(2, 0.75)]
    assert tensorboard_scalars(tmp_path, "end/loss") == [(4, 0.25)]


def test_tensorboard_writes_a_scalar_before_the_next_step(tmp_path):
    (sink,) = open_trackers(["tensorboard"], tmp_path, "r", {}, resumed=False, log_line=pytest.fail)
    for number in (1, 2, 3):
        sink(step(number))
        assert tensorboard_scalars(tmp_path, "train/loss")[-1] == (number, 1.0)
    sink.close()


def test_tensorboard_shows_repeated_steps_of_a_resumption_once(tmp_path):
    track("tensorboard", tmp_path, step(2, 1.0), step(4, 3.0))
    track("tensorboard", tmp_path, step(4, 2.0), step(6, 1.5), resumed=True)
    assert tensorboard_scalars(tmp_path, "train/loss") == [(2, 1.0), (4, 2.0), (6, 1.5)]


def test_tensorboard_has_the_settings(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    track("tensorboard", tmp_path, step(2))
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    content = read.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    assert hparams["run.seed"].number_value == 7
    assert hparams["strategy.bucket_lengths"].string_value == "[2, 3]"


def mlflow_run(run_dir):
    from mlflow import MlflowClient

    client = MlflowClient((run_dir / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("stretto")
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


def test_mlflow_reads_back_what_was_logged(tmp_path):
    assert track("mlflow", tmp_path, STARTED, step(2), EVAL, step(4, math.nan), ENDED) == []
    client, run = mlflow_run(tmp_path)
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(entry.step, entry.value) for entry in history[:1]] == [(2, 1.0)]
    assert math.isnan(history[1].value)
    assert run.data.metrics["eval/accuracy"] == 0.75
    assert run.data.metrics["end/efficiency"] == 0.75
    assert run.data.params["strategy.bucket_lengths"] == "[2, 3]"
    assert (run.info.run_name, run.info.status) == ("r", "FINISHED")


def test_mlflow_marks_a_run_without_an_end_as_failed(tmp_path):
    track("mlflow", tmp_path, step(2))
    assert mlflow_run(tmp_path)[1].info.status == "FAILED"


def test_mlflow_continues_the_run_and_tags_changed_settings(tmp_path):
    track("mlflow", tmp_path, step(2))
    changed = {**SETTINGS, "optim.lr": 0.2, "train.steps": 9}
    assert track("mlflow", tmp_path, step(4), ENDED, resumed=True, settings=changed) == []
    client, run = mlflow_run(tmp_path)  # one run, not two
    assert [m.step for m in client.get_metric_history(run.info.run_id, "train/loss")] == [2, 4]
    assert run.data.params["optim.lr"] == "0.1"
    assert run.data.tags["resumed.optim.lr"] == "0.2"
    assert run.data.params["train.steps"] == "9"
    assert run.info.status == "FINISHED"


def test_mlflow_creates_a_run_if_the_store_has_lost_the_old_one(tmp_path):
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers" / "mlflow.id").write_text("0123456789abcdef0123456789abcdef\n")
    assert track("mlflow", tmp_path, step(4), ENDED, resumed=True) == []
    assert mlflow_run(tmp_path)[1].data.metrics["train/loss"] == 1.0


def refuse_connections(monkeypatch) -> list[float]:
    """Point MLflow at a port where no server listens; return the waits that it asks for.

    It does not wait really.
    """
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # freed again: connections are refused
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{taken.getsockname()[1]}")
    waits = []
    # Only urllib3's clock is replaced: sleeps of other threads stay real and are not counted.
    clock = SimpleNamespace(sleep=waits.append, time=time.time)
    monkeypatch.setattr("urllib3.util.retry.time", clock)
    return waits


@pytest.mark.parametrize("resumed", [False, True])
def test_mlflow_gives_up_an_absent_server_within_seconds(tmp_path, monkeypatch, resumed):
    waits = refuse_connections(monkeypatch)
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers" / "mlflow.id").write_text("0123456789abcdef0123456789abcdef\n")
    (said,) = track("mlflow", tmp_path, step(1), resumed=resumed)
    assert "the run goes on" in said
    assert sum(waits) < 10


def test_mlflow_waits_at_most_30_s_for_a_silent_server():
    tries = 1 + int(os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"])
    assert tries * int(os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"]) <= 30


def test_mlflow_creates_no_new_run_if_the_server_of_a_resumed_run_is_silent(tmp_path, monkeypatch):
    refuse_connections(monkeypatch)
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers" / "mlflow.id").write_text("0123456789abcdef0123456789abcdef\n")
    (said,) = track("mlflow", tmp_path, step(1), resumed=True)
    assert "runs/get" in said


def test_mlflow_logs_at_most_100_settings_in_one_call(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    def checked(self, run_id, params=(), *, log=MlflowClient.log_batch, **rest):
        assert len(params) <= 100  # a server refuses more; a folder does not
        return log(self, run_id, params=params, **rest)

    monkeypatch.setattr(MlflowClient, "log_batch", checked)
    many = {f"table.key{i}": i for i in range(250)}
    assert track("mlflow", tmp_path, step(1), settings=many) == []
    assert len(mlflow_run(tmp_path)[1].data.params) == 250


def test_mlflow_uses_the_tracking_uri_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "theirs" / "mlruns").as_uri())
    track("mlflow", tmp_path / "ours", step(1))
    assert not (tmp_path / "ours" / "mlruns").exists()
    assert mlflow_run(tmp_path / "theirs")[1].data.metrics["train/loss"] == 1.0


def wandb_records(run_dir):
    """Return every record of the offline runs below ``run_dir``."""
    from wandb.proto.wandb_internal_pb2 import Record

    paths = sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb"))
    return [Record.FromString(r) for path in paths for r in log_records(path.read_bytes())]


def log_records(content: bytes):
    """Yield the records of a LevelDB log, after W&B's header of seven bytes."""
    offset, block, header = 7, 32768, struct.Struct("<IHB")
    parts = b""
    while offset + header.size <= len(content):
        if block - offset % block < header.size:  # too little for a header: the next block
            offset += block - offset % block
            continue
        _checksum, length, kind = header.unpack_from(content, offset)
        offset += header.size
        parts += content[offset : offset + length]
        offset += length
        if kind in (1, 4):  # whole, or the last of several
            yield parts
            parts = b""


def wandb_history(run_dir, name):
    rows = [
        {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        for record in wandb_records(run_dir)
        if record.WhichOneof("record_type") == "history"
    ]
    return [(int(row["_step"]), row[name]) for row in rows if name in row]


def processes_below() -> list[str]:
    return [child.name() for child in psutil.Process().children(recursive=True)]


def test_wandb_offline_file_holds_what_was_logged(tmp_path):
    assert track("wandb", tmp_path, STARTED, step(2), EVAL, step(4, math.nan), ENDED) == []
    assert wandb_history(tmp_path, "train/loss") == [(2, "1"), (4, "NaN")]
    assert wandb_history(tmp_path, "eval/accuracy") == [(2, "0.75")]
    records = wandb_records(tmp_path)
    (run,) = [r.run for r in records if r.WhichOneof("record_type") == "run"][:1]
    config = {item.key: item.value_json for item in run.config.update}
    assert (run.display_name, run.project) == ("r", "stretto")
    assert config["run.seed"] == "7"
    assert [r.exit.exit_code for r in records if r.WhichOneof("record_type") == "exit"] == [0]


def test_wandb_leaves_no_process_behind(tmp_path):
    (sink,) = open_trackers(["wandb"], tmp_path, "r", {}, resumed=False, log_line=pytest.fail)
    assert any("wandb" in name for name in processes_below())
    sink.close()
    deadline = time.monotonic() + 10
    while any("wandb" in name for name in processes_below()):
        assert time.monotonic() < deadline, processes_below()
        time.sleep(0.02)


def test_wandb_keeps_the_run_id_at_a_resumption(tmp_path):
    track("wandb", tmp_path, step(2))
    track("wandb", tmp_path, step(4), resumed=True)
    runs = [r.run.run_id for r in wandb_records(tmp_path) if r.WhichOneof("record_type") == "run"]
    assert len(set(runs)) == 1


def test_a_new_run_gets_a_new_wandb_id(tmp_path):
    track("wandb", tmp_path, step(2))
    first = (tmp_path / "trackers" / "wandb.id").read_text()
    track("wandb", tmp_path, step(2))
    assert (tmp_path / "trackers" / "wandb.id").read_text() != first


def test_wandb_uses_the_mode_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert track("wandb", tmp_path, step(2), ENDED) == []
    assert list(tmp_path.glob("wandb/*run-*")) == []


# Failures


class Failing:
    def __init__(self, tracked_run):
        self.events = 0

    def __call__(self, event):
        self.events += 1
        raise OSError(28, "No space left on device")

    def close(self):
        raise OSError("cannot close either")


class FailingToOpen:
    def __init__(self, tracked_run):
        raise RuntimeError("no\nserver")


@pytest.mark.parametrize("events", [0, 1, 5])
def test_a_tracker_that_fails_is_logged_once_and_the_run_goes_on(events, tmp_path, monkeypatch):
    monkeypatch.setattr("stretto.telemetry.tracker_backends.TensorBoard", Failing)
    said = track("tensorboard", tmp_path, *[step(i) for i in range(events)])
    assert len(said) == 1
    assert "tensorboard" in said[0]
    assert ("No space left" if events else "cannot close either") in said[0]


def test_a_tracker_that_cannot_open_is_logged_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("stretto.telemetry.tracker_backends.TensorBoard", FailingToOpen)
    (said,) = track("tensorboard", tmp_path, step(1), ENDED)
    assert said.endswith("RuntimeError: no server")


def test_an_interrupt_is_not_treated_as_a_failing_tracker(tmp_path, monkeypatch):
    def interrupt(_self, _event):
        raise KeyboardInterrupt

    monkeypatch.setattr("stretto.telemetry.tracker_backends.TensorBoard.__call__", interrupt)
    (sink,) = open_trackers(["tensorboard"], tmp_path, "r", {}, resumed=False, log_line=pytest.fail)
    with pytest.raises(KeyboardInterrupt):
        sink(step(1))


def test_a_run_whose_wandb_process_is_killed_ends_normally(tmp_path):
    code = """
    import signal, sys, psutil
    from pathlib import Path
    from stretto.telemetry.events import StepDone
    from stretto.telemetry.trackers import open_trackers

    said = []
    (sink,) = open_trackers(["wandb"], Path.cwd(), "r", {}, resumed=False, log_line=said.append)
    for number in range(200):
        if number == 1:
            for child in psutil.Process().children(recursive=True):
                child.send_signal(signal.SIGKILL)
                child.wait(10)
        sink(StepDone(number, 0, 1.0, 0.1, 64.0, 0.5, 0.7, 0.2, 0.1, 3.0))
    sink.close()
    print(len(said), flush=True)
    sys.exit(75)
    """
    done = run_python(code, tmp_path)
    assert (done.stdout.strip(), done.returncode) == ("1", 75), done.stderr
    assert "Traceback" not in done.stderr
