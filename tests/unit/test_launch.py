"""Launch scripts: what they print under --dry-run, what they refuse, and the parts that can run without a cloud."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))
AT = "--project=my-project --zone=us-east5-b"
SLICE = ["--project", "my-project", "--zone", "us-east5-b", "--name", "my-slice"]
KIND = ["--accelerator-type", "v6e-8", "--runtime-version", "v2-alpha-tpuv6e"]
SOURCE = ["--repository", "https://example.com/me/dspark_jax.git", "--ref", "v0.1.0"]
RUN = [
    "--config",
    "configs/qwen3_4b_dspark.py",
    "--data",
    "gs://my-bucket/train.jsonl",
    "--output",
    "gs://my-bucket/run",
]
CLUSTER = ["--project", "my-project", "--zone", "us-east5-b", "--cluster", "my-cluster"]
SUBMIT = [*CLUSTER, *["--tpu-type", "v6e-8", "--workload", "my-run", "--bucket", "my-bucket"], *RUN]

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")


def call(script: str, *arguments: str, **kwargs) -> subprocess.CompletedProcess[str]:
    # A loop that never ends would outlive the test: `timeout` ends everything it started.
    command = ["timeout", "30", "bash", str(LAUNCH / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **kwargs)


def dry_run(script: str, *arguments: str) -> list[str]:
    """The commands of a dry run; nothing may reach stderr, and nothing but commands stdout."""
    head, separator, tail = " ".join(["\0".join(arguments)]).partition("\0--\0")
    before, after = [x for x in head.split("\0") if x], [x for x in tail.split("\0") if x]
    found = call(script, *before, "--dry-run", *(["--", *after] if separator else []))
    assert (found.returncode, found.stderr) == (0, "")
    lines = found.stdout.splitlines()
    assert all(shlex.split(line)[0] in ("gcloud", "xpk", "kubectl") for line in lines)
    return lines


def ssh(command: str, worker: str = "all") -> str:
    return f"gcloud compute tpus tpu-vm ssh my-slice {AT} --worker={worker} {command}"


def queued(verb: str, arguments: str) -> str:
    return f"gcloud compute tpus queued-resources {verb} my-slice {AT} {arguments}"


CREATE = queued("create", "--node-id=my-slice --accelerator-type=v6e-8 --runtime-version=v2-alpha-tpuv6e --spot")
STATE = queued("describe", "'--format=value(state.state)'")
DELETE = queued("delete", "--force --quiet")
INSTALL = [
    ssh(
        "'--command=git init dspark_jax && cd dspark_jax && git fetch --depth 1 "
        "https://example.com/me/dspark_jax.git v0.1.0 && git checkout --detach FETCH_HEAD'"
    ),
    ssh("--command=dspark_jax/launch/worker_install.sh"),
]
TRAIN = ssh(
    "'--command=cd dspark_jax && rm -f ../dspark.status && tmux new-session -d -s dspark env launch/worker_train.sh "
    "--config configs/qwen3_4b_dspark.py --data gs://my-bucket/train.jsonl --output gs://my-bucket/run'"
)


def test_dry_runs_print_the_commands():
    assert dry_run("create.sh", *SLICE, *KIND, "--spot") == [CREATE, STATE]
    assert dry_run("create.sh", *SLICE, *KIND) == [CREATE.removesuffix(" --spot"), STATE]
    assert dry_run("install.sh", *SLICE, *SOURCE) == INSTALL
    assert dry_run("run.sh", *SLICE, *RUN) == [TRAIN]
    assert dry_run("logs.sh", *SLICE) == [ssh("'--command=tail -n 100 -F dspark.log'", worker="0")]
    assert dry_run("logs.sh", *SLICE, "--worker=all", "--lines=5") == [ssh("'--command=tail -n 5 -F dspark.log'")]
    assert dry_run("delete.sh", *SLICE) == [DELETE]


def test_resume_recreates_installs_and_runs_the_same_command():
    status = ssh("'--command=cat dspark.status 2>/dev/null || echo running'")
    commands = dry_run("resume.sh", *SLICE, *KIND, "--spot", *SOURCE, *RUN)
    assert commands == [STATE, status, DELETE, CREATE, STATE, *INSTALL, TRAIN]
    extra = ["--env", "JAX_LOG_COMPILES=1", "--env=NOTE=two words", "--", "--mesh.fsdp", "8"]
    again = dry_run("resume.sh", *SLICE, *KIND, *SOURCE, *RUN, *extra)
    assert again[-1] == dry_run("run.sh", *SLICE, *RUN, *extra)[0]


def test_xpk_dry_runs():
    at = f"--cluster=my-cluster {AT}"
    assert dry_run("xpk.sh", "create-cluster", *CLUSTER, "--tpu-type", "v6e-8", "--spot") == [
        f"xpk cluster create {at} --tpu-type=v6e-8 --num-slices=1 --spot --enable-workload-identity "
        "--enable-gcsfuse-csi-driver"
    ]
    assert dry_run("xpk.sh", "attach-bucket", *CLUSTER, "--bucket", "my-bucket") == [
        f"xpk storage attach my-bucket {at} --type=gcsfuse --bucket=my-bucket --size=1 --mount-point=/gcs/my-bucket "
        "--readonly=false --auto-mount=false"
    ]
    (submit,) = dry_run("xpk.sh", "submit", *SUBMIT, "--env", "NOTE=a b", "--", "--steps", "3")
    words = shlex.split(submit)
    assert words[:3] == ["xpk", "workload", "create"] and "--restart-on-exit-codes=75" in words
    assert "--env=NOTE=a b" in words and "--storage=my-bucket" in words and "--max-restarts=100" in words
    assert words[-1] == (
        "--command=pip install --quiet -e . 'jax[tpu]' && exec python -m dspark_jax.train --processes.coordinator auto "
        "--config configs/qwen3_4b_dspark.py --data /gcs/my-bucket/train.jsonl --output /gcs/my-bucket/run --steps 3"
    )
    assert dry_run("xpk.sh", "logs", *CLUSTER, "--workload", "my-run") == [
        "gcloud container clusters get-credentials my-cluster --project=my-project --location=us-east5",
        "kubectl logs --follow --prefix --tail=100 --max-log-requests=100 "
        "--selector=jobset.sigs.k8s.io/jobset-name=my-run",
    ]
    delete = dry_run("xpk.sh", "delete", *CLUSTER, "--workload", "my-run")
    assert delete == [f"xpk workload delete {at} --workload=my-run --force"]
    assert dry_run("xpk.sh", "delete-cluster", *CLUSTER) == [f"xpk cluster delete {at} --force"]


COMPLETE = {
    "create.sh": [*SLICE, *KIND],
    "install.sh": [*SLICE, *SOURCE],
    "run.sh": [*SLICE, *RUN],
    "logs.sh": SLICE,
    "resume.sh": [*SLICE, *KIND, *SOURCE, *RUN],
    "delete.sh": SLICE,
    "xpk.sh submit": SUBMIT,
}


@pytest.mark.parametrize("script", COMPLETE)
def test_a_missing_argument_is_named(script):
    name, *action = script.split()
    complete = COMPLETE[script]
    for i in range(0, len(complete), 2):
        found = call(name, *action, *complete[:i], *complete[i + 2 :], "--dry-run")
        assert (found.returncode, found.stdout) == (2, "")
        assert f"{name}: {complete[i]} " in found.stderr and "is missing" in found.stderr
    assert "needs a value" in call(name, *action, complete[0]).stderr
    shown = call(name, *action, "--help")
    assert shown.returncode == 0 and f"usage: {script} " in shown.stdout
    assert all(option in shown.stdout for option in complete[::2])


@pytest.mark.parametrize(
    ("script", "option", "value"),
    [
        ("create.sh", "--project", "my project"),
        ("create.sh", "--zone", "us-east5"),
        ("create.sh", "--name", "-rf"),
        ("create.sh", "--name", "a;b"),
        ("create.sh", "--accelerator-type", "v6e"),
        ("create.sh", "--runtime-version", "$(id)"),
        ("install.sh", "--repository", "https://example.com/a b"),
        ("install.sh", "--repository", "--upload-pack=x"),
        ("install.sh", "--ref", "--force"),
        ("install.sh", "--ref", "a b"),
        ("run.sh", "--config", "configs/a'b.py"),
        ("run.sh", "--data", "two\nlines"),
        ("run.sh", "--env", "1X=2"),
        ("logs.sh", "--worker", "first"),
        ("logs.sh", "--lines", "-5"),
    ],
)
def test_odd_values_are_refused(script, option, value):
    found = call(script, *COMPLETE[script], option, value, "--dry-run")
    assert (found.returncode, found.stdout) == (2, "") and f"{option} " in found.stderr
    assert "is not a valid" in found.stderr


def test_unknown_arguments_are_refused():
    for extra, message in (
        (["--spto"], "unknown argument --spto"),
        (["--dry"], "unknown argument --dry"),
        (["us"], "unknown argument us"),
        (["--dry-run=no"], "--dry-run takes no value"),
        (["--", "x"], "takes nothing after --"),
    ):
        found = call("delete.sh", *SLICE, *extra)
        assert found.returncode == 2 and message in found.stderr, found.stderr
    assert "control character" in call("run.sh", *SLICE, *RUN, "--dry-run", "--", "a\nb").stderr
    assert "ACTION is missing" in call("xpk.sh").stderr
    assert "unknown action start" in call("xpk.sh", "start").stderr
    assert (
        "does not lie in --bucket my-bucket"
        in call("xpk.sh", "submit", *SUBMIT, "--data", "gs://other/x.jsonl", "--dry-run").stderr
    )


ODD = ["it's", 'a "b" c', "$HOME `id`", "back\\slash", "*", "", "ünï", "a;b&&c|d", "--x=y z"]


def test_quoting_survives_two_shells():
    """The line's own shell and the worker's give training exactly the words that were given here."""
    (line,) = dry_run("run.sh", *SLICE, *RUN, "--env", "NOTE=it's $x", "--", *[x for x in ODD if x])
    command = shlex.split(line)[-1].removeprefix("--command=")
    words = shlex.split(command.partition("-s dspark ")[2])
    assert words[:3] == ["env", "NOTE=it's $x", "launch/worker_train.sh"]
    assert words[3:] == [*RUN, *[x for x in ODD if x]]
    script = f'source "{LAUNCH}/common.sh"; quote "$@"'
    quoted = subprocess.run(["bash", "-c", script, "x", *ODD], capture_output=True, text=True, check=True).stdout
    back = subprocess.run(["bash", "-c", f"printf '%s\\0' {quoted}"], capture_output=True, text=True, check=True).stdout
    assert back.split("\0")[:-1] == ODD


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound(path):
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    text = path.read_text()
    if path.name != "common.sh":
        assert text.startswith("#!/usr/bin/env bash\n") and "\nset -euo pipefail\n" in text
        assert os.access(path, os.X_OK)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    checked = subprocess.run([shellcheck, "-x", "-P", LAUNCH.parent, path], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def executable(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def worker(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A home folder with the installed repository, and stand-ins for gcsfuse and the training program."""
    home = tmp_path / "home"
    (home / "dspark_jax" / "launch").mkdir(parents=True)
    shutil.copy(LAUNCH / "worker_train.sh", home / "dspark_jax" / "launch")
    executable(tmp_path / "bin" / "mountpoint", "exit 1")
    executable(tmp_path / "bin" / "gcsfuse", 'echo "mounted $*"')
    return home, {**os.environ, "HOME": str(home), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}


def test_a_worker_mounts_trains_and_leaves_its_status(worker):
    home, environment = worker
    executable(home / "dspark_jax" / ".venv" / "bin" / "python", 'printf "%s|" "$DSPARK_CACHE" "$@"; exit 3')
    script = home / "dspark_jax" / "launch" / "worker_train.sh"
    arguments = ["--data", "gs://my-bucket/a b.jsonl", "--steps", "3"]
    found = subprocess.run([script, *arguments], env={**environment, "DSPARK_CACHE": "gs://other/cache"})
    assert found.returncode == 3 and (home / "dspark.status").read_text() == "3\n"
    log = (home / "dspark.log").read_text()
    for bucket in ("my-bucket", "other"):
        assert f"mounted --implicit-dirs {bucket} {home}/gcs/{bucket}\n" in log
    assert log.endswith(
        f"\n{home}/gcs/other/cache|-m|dspark_jax.train|--processes.coordinator|auto|--data|"
        f"{home}/gcs/my-bucket/a b.jsonl|--steps|3|"
    )
    executable(Path(environment["PATH"].split(":")[0]) / "gcsfuse", "exit 9")
    subprocess.run([script, "--data", "gs://my-bucket/a.jsonl"], env=environment)
    assert (home / "dspark.status").read_text() == "9\n"


def test_a_worker_waits_for_the_checkpoint_when_it_is_signalled(worker):
    home, environment = worker
    program = "trap 'sleep 0.3; echo saved; exit 75' TERM; echo training; while :; do sleep 0.05; done"
    executable(home / "dspark_jax" / ".venv" / "bin" / "python", program)
    script = home / "dspark_jax" / "launch" / "worker_train.sh"
    process = subprocess.Popen([script, "--steps", "3"], env=environment, start_new_session=True)
    log, deadline = home / "dspark.log", time.monotonic() + 30
    while not (log.exists() and "training" in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(timeout=30) == 75
    assert (home / "dspark.status").read_text() == "75\n" and log.read_text().endswith("saved\n")


GCLOUD = r"""
echo "$*" >>"$CALLS"
case $* in
  *describe*) line=$(head -n 1 "$STATES"); sed -i 1d "$STATES"; [[ $line != offline ]] || exit 1; echo "$line" ;;
  *"cat dspark.status"*) line=$(head -n 1 "$ANSWERS"); sed -i 1d "$ANSWERS"; printf '%b\n' "$line" ;;
esac
"""


@pytest.mark.parametrize(
    ("states", "answers", "status", "restarts"),
    [
        ("ACTIVE offline ACTIVE", r"running\nrunning 0\n0", 0, 0),
        ("ACTIVE ACTIVE", r"75\nrunning 75\n1", 1, 0),
        ("ACTIVE ACTIVE ACTIVE", "75 0", 0, 1),
        ("SUSPENDING WAITING_FOR_RESOURCES ACTIVE ACTIVE", "0", 0, 1),
        ("ACTIVE SUSPENDED ACTIVE ACTIVE ACTIVE ACTIVE", r"running 75\n75 75\n0 2", 2, 2),
    ],
)
def test_resume_goes_on_while_a_run_is_interrupted(tmp_path, states, answers, status, restarts):
    """A stand-in for gcloud plays the states of the slice and the exit statuses of its workers."""
    executable(tmp_path / "bin" / "gcloud", GCLOUD)
    files = {name: tmp_path / name.lower() for name in ("CALLS", "STATES", "ANSWERS")}
    files["STATES"].write_text("\n".join(states.split()) + "\n")
    files["ANSWERS"].write_text("\n".join(answers.split()) + "\n")
    environment = {**os.environ, **{name: str(path) for name, path in files.items()}}
    environment["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    if states.startswith("ACTIVE SUSPENDED"):  # the second interruption ends with every worker at 0 or 75
        files["ANSWERS"].write_text("running\n75\\n0\n2\n")
    found = call("resume.sh", *SLICE, *KIND, *SOURCE, *RUN, "--poll", "0", env=environment)
    assert found.returncode == status, found.stderr
    calls = files["CALLS"].read_text()
    assert [calls.count(x) for x in ("resources delete", "resources create", "git fetch", "new-session")] == (
        [restarts] * 4
    )
    assert not files["STATES"].read_text() and not files["ANSWERS"].read_text()
