"""The order in which systems decode batches, and what each call is given; the engine is a stand-in."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from decoded import answer, drafter, target
from rich.console import Console

from dspark_jax.evaluation import measure as module
from dspark_jax.evaluation.measure import PLAIN, Settings, batches, measure
from dspark_jax.evaluation.tasks import Prompt
from dspark_jax.progress import Progress

PROMPTS = [Prompt(f"f:{i}", domain, f"q{i}") for i, domain in enumerate(["math"] * 3 + ["code"])]
CONSOLE = Console(file=io.StringIO())


@pytest.fixture
def calls(monkeypatch):
    made = []

    def generate(target, drafter, prompts, *, on_progress, **settings):
        made.append(SimpleNamespace(drafter=drafter, prompts=prompts, **settings))
        on_progress(1, 0)
        on_progress(2, len(prompts))
        return [answer([0], plain=drafter is None) for _ in prompts]

    monkeypatch.setattr(module, "generate", generate)
    return made


def run(drafters, **settings):
    return measure(target(), drafters, PROMPTS, Settings(**settings), console=CONSOLE)


def test_every_batch_meets_plain_decoding_then_every_drafter(calls):
    result = run([drafter("a"), drafter("b")], batch_size=2, seed=5)
    names = [c.drafter.name if c.drafter else PLAIN for c in calls]
    assert names == [PLAIN, "a", "b"] * 3
    assert [len(c.prompts) for c in calls[::3]] == [2, 1, 1]
    assert [c.prompts[0][0]["content"] for c in calls[::3]] == ["q0", "q2", "q3"]
    # Prompt i is seeded with seed + i in every system, whatever the batch size.
    assert [c.seed for c in calls] == [5, 5, 5, 7, 7, 7, 8, 8, 8]
    assert {c.batch_size for c in calls} == {2}
    assert result.domains == ("math", "code")
    assert [s.batch for s in result.samples["a"]] == [0, 0, 1, 2]
    assert [s.prompt.id for s in result.samples[PLAIN]] == [p.id for p in PROMPTS]


def test_batches_do_not_mix_domains():
    assert [(start, len(part)) for start, part in batches(PROMPTS, 16)] == [(0, 3), (3, 1)]
    assert [(start, len(part)) for start, part in batches(PROMPTS, 1)] == [(i, 1) for i in range(4)]


def test_block_size_and_threshold_go_where_they_apply(calls):
    result = run([drafter("a", confidence_head=True), drafter("b")], confidence_threshold=0.5)
    assert [(c.block_size, c.confidence_threshold) for c in calls[:3]] == [(None, 0.0), (3, 0.5), (3, 0.0)]
    assert [s.confidence_threshold for s in result.systems] == [0.0, 0.5, 0.0]
    run([drafter("a")], block_size=2)
    assert [c.block_size for c in calls[-2:]] == [None, 2]


def test_names_must_differ(calls):
    for names in (["a", "a"], [PLAIN]):
        with pytest.raises(ValueError, match="distinct names"):
            run([drafter(name) for name in names])
    assert not calls


def test_no_prompts():
    with pytest.raises(ValueError, match="no prompts"):
        measure(target(), [], [], Settings())


@pytest.mark.parametrize(
    "settings", [{"max_new_tokens": 0}, {"batch_size": 0}, {"temperature": -1.0}, {"confidence_threshold": 1.5}]
)
def test_settings_out_of_range(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Settings(**settings)


def test_progress_ends_at_whole_answers(calls, monkeypatch):
    seen = []
    update = Progress.update
    monkeypatch.setattr(Progress, "update", lambda self, n, **f: (update(self, n, **f), seen.append(self.completed)))
    run([drafter("a")], max_new_tokens=20, batch_size=2)
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(8)
