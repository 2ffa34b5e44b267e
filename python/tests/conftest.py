"""Eight devices in one process, so that shardings are real without a cluster."""

import os

# Before anything imports jax.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
# What would steer the recorders; these two are the tests' own.
KEPT = {"BACKTAPE_SEED", "BACKTAPE_CASES"}
for name in [name for name in os.environ if name.startswith("BACKTAPE_") and name not in KEPT]:
    del os.environ[name]
