"""`python -m dspark_jax.bench`: step costs, training costs and load, each side by side in one run."""
