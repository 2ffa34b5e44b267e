"""Clean jobs, simulated in torch and in jax, whose steps must raise no alarm."""
