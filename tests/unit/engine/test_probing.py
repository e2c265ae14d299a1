"""How often a scheduler drafts where drafting does not pay."""

from dspark_jax.engine.probing import FIRST_WAIT, LONGEST_WAIT, Probing


def drafted(probing: Probing, pays) -> list[int]:
    return [i for i, p in enumerate(pays) if not probing.skips(pays=p)]


def test_probes_become_rare_where_drafting_never_pays():
    steps = drafted(Probing(), [False] * 2000)
    waits = [b - a - 1 for a, b in zip([-1, *steps], steps, strict=False)]
    assert waits[:5] == [16, 32, 64, 128, 256] and set(waits[5:]) == {LONGEST_WAIT}


def test_drafting_that_pays_is_never_skipped_and_resets_the_wait():
    probing = Probing()
    assert drafted(probing, [False] * 100) == [16, 49]
    assert drafted(probing, [True] * 5) == [0, 1, 2, 3, 4]
    assert drafted(probing, [False] * (FIRST_WAIT + 1)) == [FIRST_WAIT]
