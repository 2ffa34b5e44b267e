

def run(x):
    """The values on the way and the gradients, by name."""
    x = {name: tensor.detach().clone().requires_grad_() for name, tensor in x.items()}
    total, seen = loss(x)
    total.backward()
    return {"loss": total} | seen | {f"d{name}": x[name].grad for name in LEAVES}


def off(found, exact):
    """Relative error in the norm over all elements."""
    found, exact = (tensor.detach().double().flatten() for tensor in (found, exact))
    return float((found - exact).norm() / exact.norm())


def main():
    inputs = {name: given[name] for name in LEAVES}
    exact = run({name: tensor.double() for name, tensor in inputs.items()})
    own = run(inputs)
    print(f"loss of these tokens {float(exact['loss']):.9g} in f64, {float(own['loss']):.9g} in the job's dtypes")
    print(f"{'':<14}{'captured':>12}{'this script':>13}")
    for name in exact:
        if f"captured.{name}" in given:
            captured = off(given[f"captured.{name}"], exact[name])
            print(f"{name:<14}{captured:>12.1e}{off(own[name], exact[name]):>13.1e}")


if __name__ == "__main__":
    main()
