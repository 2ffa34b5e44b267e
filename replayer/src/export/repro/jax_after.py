

def run(x):
    """The values on the way and the gradients, by name."""
    (total, seen), gradients = jax.value_and_grad(loss, has_aux=True)(x)
    return {"loss": total} | seen | {f"d{name}": gradients[name] for name in LEAVES}


def off(found, exact):
    """Relative error in the norm over all elements."""
    found, exact = (np.asarray(array, np.float64).ravel() for array in (found, exact))
    return np.linalg.norm(found - exact) / np.linalg.norm(exact)


def main():
    inputs = {name: given[name] for name in LEAVES}
    exact = run({name: array.astype(jnp.float64) for name, array in inputs.items()})
    own = run(inputs)
    print(f"loss of these tokens {float(exact['loss']):.9g} in f64, {float(own['loss']):.9g} in the job's dtypes")
    print(f"{'':<14}{'captured':>12}{'this script':>13}")
    for name in exact:
        if f"captured.{name}" in given:
            captured = off(given[f"captured.{name}"], exact[name])
            print(f"{name:<14}{captured:>12.1e}{off(own[name], exact[name]):>13.1e}")


if __name__ == "__main__":
    main()
