#!/usr/bin/env bash
# Runs on a worker, called by install.sh: gcsfuse, a Python that is new enough, the package.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! command -v gcsfuse >/dev/null; then
  key=/usr/share/keyrings/cloud.google.asc
  curl -fsSL https://packages.cloud.google.com/apt/doc/apt-key.gpg | sudo tee "$key" >/dev/null
  echo "deb [signed-by=$key] https://packages.cloud.google.com/apt gcsfuse-$(lsb_release -cs) main" |
    sudo tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null
  sudo apt-get update -qq
  sudo apt-get install -qq gcsfuse
fi

# TPU images come with an older Python than the package needs; uv brings its own.
uv=$HOME/.local/bin/uv
[[ -x $uv ]] || curl -LsSf https://astral.sh/uv/install.sh | sh
[[ -d .venv ]] || "$uv" venv --python 3.12 .venv
"$uv" pip install --quiet --python .venv/bin/python -e . 'jax[tpu]'
