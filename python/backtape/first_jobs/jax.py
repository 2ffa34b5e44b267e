"""A jax job that records its step 0, of a loss head and SGD: python FILE; replay --dump dumps --step 0"""
import backtape, jax
k, q = jax.random.normal(jax.random.key(0), (2, 256, 32))  # k is trained; the label of token i is i
with backtape.Recorder.from_env(steps="0", dir="dumps") as recorder:
    for step in range(3):
        with recorder.step(step) as tape:
            loss, (dk, dq) = jax.value_and_grad(lambda k, q: -jax.nn.log_softmax(q @ k.T).trace() / 256, (0, 1))(k, q)
            tape.head(path="plain")
            for name, value in dict(q=q, k=k, labels=jax.numpy.arange(256), loss=loss, dq=dq, dk=dk).items():
                tape.record(name, value, microbatch=None if name == "k" else 0)
            sgd = {"optimizer": {"name": "sgd", "lr": 0.1}, "params": [k], "grads": [dk]}
            backtape.jax.step_algebra(tape, new_params=[k := k - 0.1 * dk], **sgd)
