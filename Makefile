# Two commands do all the set-up: `make demo` and `make test`.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := bin/python -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps
# All that goes into the wheel: it is built again only when one of these changed.
SOURCES := $(shell find proto src dumper replayer/src python/src python/backtape -name '*.rs' -o -name '*.py' -o -name '*.pyi' -o -name '*.proto' -o -name '*.cu' -o -name '*.cuh' -o -name '*.css' -o -name '*.js') \
	$(wildcard Cargo.* */Cargo.toml) python/pyproject.toml

.PHONY: demo test test-rust test-python test-deploy test-torch test-frameworks test-ray test-gpu bench bench-loss-head bench-replay bench-compare \
	bench-algebra bench-inactive bench-attached bench-blocking bench-step bench-scalars bench-reports bench-false-alarms bench-causes bench-foreign \
	bench-trainers bench-step-causes bench-step-threads bench-step-false-alarms bench-step-cost \
	bench-durable bench-small bench-stream bench-gpu bench-search \
	soak soak-kill soak-launches soak-powercut soak-seeded soak-rot soak-scale soak-simulation \
	soak-network soak-bucket soak-flips soak-heads soak-marathon wheel pictures step-causes api clean

demo: $(VENV)/.installed
	examples/demo.sh demo

test: test-rust test-python

test-rust:
	cargo test --locked

# What deploy/ is tested by, apart, as it needs root and takes minutes of waiting: hosts with a
# real sshd, Slurm, Kubernetes' schemas. CI runs it.
DEPLOY := $(patsubst %,python/tests/test_%.py,deploy slurm kubernetes dockerfile)

# Whole files at a time: their tests share dumps.
test-python: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -n 2 --dist loadfile python/tests $(addprefix --ignore=,$(DEPLOY))

test-deploy: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q $(DEPLOY)

# The tests that need torch, in an environment of its own: its default wheel brings CUDA along. Whole
# files at a time: their tests share dumps.
test-torch: $(VENV)-torch/.installed-dev
	$(VENV)-torch/bin/python -m pytest -q -n 2 --dist loadfile python/tests_torch

$(VENV)-torch/.tools: python/requirements-torch.txt
	$(PYTHON) -m venv $(VENV)-torch
	$(VENV)-torch/bin/python -m pip install --quiet --disable-pip-version-check -r python/requirements-torch.txt
	touch $@

$(VENV)-torch/.installed: $(VENV)/.wheel $(VENV)-torch/.tools
	$(VENV)-torch/$(INSTALL) $(VENV)/wheels/*.whl
	rm -f $@-dev && touch $@

$(VENV)-torch/.installed-dev: $(VENV)/.wheel-dev $(VENV)-torch/.tools
	$(VENV)-torch/$(INSTALL) $(VENV)/wheels-dev/*.whl
	rm -f $(@:-dev=) && touch $@

# The tests of jobs of other libraries (DeepSpeed, Megatron-LM, transformers, trl, Accelerate, Lightning) and of losses of others, in an environment
# that has torch from that of test-torch.
test-frameworks: $(VENV)-frameworks/.tools $(VENV)-torch/.installed-dev
	$(VENV)-frameworks/bin/python -m pytest -q -n 2 --dist loadfile python/tests_frameworks

TRAINERS := deepspeed==0.19.8 megatron-core==0.16.1 liger-kernel==0.8.5 cut-cross-entropy==25.1.1
$(VENV)-frameworks/.tools: python/requirements-frameworks.txt $(VENV)-torch/.tools
	$(PYTHON) -m venv $(VENV)-frameworks
	cd $(VENV)-torch/lib/python3*/site-packages && pwd > $(CURDIR)/$(VENV)-frameworks/torch.pth
	mv $(VENV)-frameworks/torch.pth $(VENV)-frameworks/lib/python3*/site-packages/
	$(VENV)-frameworks/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(VENV)-frameworks/bin/python -m pip install --quiet --disable-pip-version-check \
		--no-deps --no-build-isolation $(TRAINERS)
	touch $@

# The table of docs/trainers.md: trainers of other people, as they are and with a planted fault. TRAINERS_FROM names a
# directory with the sources of those that no package has (tests/trainers/run.py says which).
bench-trainers: $(VENV)-trainers/.tools $(VENV)-torch/.installed-dev
	$(VENV)-trainers/bin/python tests/trainers/run.py $(if $(TRAINERS_FROM),--sources $(TRAINERS_FROM))
	PYTHONPATH=$(VENV)-trainers/torchao $(VENV)-trainers/bin/python tests/trainers/run.py torchtune

# torchtune takes an older torchao than peft does, so that this one is where only torchtune looks.
$(VENV)-trainers/.tools: python/requirements-trainers.txt $(VENV)-frameworks/.tools
	$(PYTHON) -m venv $(VENV)-trainers
	for one in torch frameworks; do (cd $(VENV)-$$one/lib/python3*/site-packages && pwd); done > $(VENV)-trainers/others.pth
	mv $(VENV)-trainers/others.pth $(VENV)-trainers/lib/python3*/site-packages/
	$(VENV)-trainers/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	$(VENV)-trainers/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--target $(VENV)-trainers/torchao torchao==0.11.0
	touch $@

# The tests that need Ray: three nodes of it on loopback, and workers that are killed.
test-ray: $(VENV)-ray/.installed-dev
	$(VENV)-ray/bin/python -m pytest -q python/tests_ray

$(VENV)-ray/.tools: python/requirements-ray.txt
	$(PYTHON) -m venv $(VENV)-ray
	$(VENV)-ray/bin/python -m pip install --quiet --disable-pip-version-check -r python/requirements-ray.txt
	touch $@

$(VENV)-ray/.installed-dev: $(VENV)/.wheel-dev $(VENV)-ray/.tools
	$(VENV)-ray/$(INSTALL) $(VENV)/wheels-dev/*.whl
	touch $@

# The tests of the reference on a GPU, on one. Without a GPU NVRTC still compiles every kernel for
# every generation; cuBLAS, half a gigabyte, is then left out.
CUDA := $(VENV)-cuda
NVIDIA := $(CURDIR)/$(CUDA)/lib/python3*/site-packages/nvidia
CUDA_LIBS := $(NVIDIA)/cu13/lib
GPU := $(wildcard /dev/nvidiactl)
test-gpu: $(CUDA)/.installed $(if $(GPU),$(CUDA)/.installed-gpu)
	@$(if $(GPU),:,echo "no GPU: kernels are compiled, not run")
	LD_LIBRARY_PATH="$$(echo $(CUDA_LIBS)):$$(echo $(NVIDIA)/nccl/lib):$$LD_LIBRARY_PATH" BACKTAPE_TEST_NVRTC=1 \
		$(if $(GPU),BACKTAPE_TEST_GPU=1) cargo test --locked --lib device::

$(CUDA)/.installed: python/requirements-cuda.txt
	$(PYTHON) -m venv $(CUDA)
	$(CUDA)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

$(CUDA)/.installed-gpu: python/requirements-gpu.txt $(CUDA)/.installed
	$(CUDA)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@# cudarc asks for libnccl.so, and the wheel has libnccl.so.2 alone.
	for nccl in $(CUDA)/lib/python3*/site-packages/nvidia/nccl/lib; do ln -sf libnccl.so.2 $$nccl/libnccl.so; done
	touch $@

# The whole of what `cargo test` runs a share of: hours. docs/reliability.md says what each
# campaign shows; power cuts need root, and the programs that make their file systems.
SOAK := target/debug/soak
soak: soak-simulation soak-seeded soak-kill soak-launches soak-powercut soak-rot soak-scale soak-network \
	soak-bucket soak-flips soak-heads soak-marathon

$(SOAK): FORCE
	cargo build --locked -p backtape-soak --features faults
FORCE:

soak-simulation:
	BACKTAPE_SIMULATIONS=300000 cargo test --locked -p backtape --lib -- --exact --nocapture \
		coordinator::simulation::no_order_of_faults_loses_what_was_acknowledged_or_undoes_a_commit

soak-seeded: $(SOAK)
	$(SOAK) seeded

soak-kill: $(SOAK)
	$(SOAK) kill --trials 10000
	$(SOAK) ready
	$(SOAK) io-errors
	$(SOAK) order
	$(SOAK) contract

soak-launches: $(SOAK)
	$(SOAK) launches --trials 1000

soak-powercut: $(SOAK)
	$(SOAK) powercut --trials 10000
	$(SOAK) powercut --fs xfs --trials 2000
	$(SOAK) powercut --fs btrfs --cut disk --trials 2000

soak-rot: $(SOAK)
	$(SOAK) bitrot --trials 100000
	$(SOAK) reassembly --trials 100000
	$(SOAK) parsers --trials 10000000
	$(SOAK) race --trials 10000
	$(SOAK) versions

# Hosts in network namespaces: needs root, ip, nft and tc (iproute2, nftables).
soak-network: $(SOAK)
	$(SOAK) network --trials 500

soak-bucket: $(SOAK)
	$(SOAK) bucket --trials 50

soak-flips:
	BACKTAPE_RUNS=1000 cargo test --locked -p backtape --test backtape -- \
		--ignored --nocapture --exact flips::the_whole_campaign \
		damage::one_flipped_bit_in_any_shard_of_any_role_accuses_nobody

# Recorded heads drawn at random through the replay; BACKTAPE_RUNS dumps from BACKTAPE_SEED on. Then
# heads whose gradients come from JAX, replayed and made into scripts.
soak-heads: $(VENV)/.installed-dev
	cargo test --locked -p backtape --test backtape -- --ignored --nocapture --exact heads::the_whole_campaign
	BACKTAPE_CASES=$${BACKTAPE_CASES:-200} $(BIN)/python -m pytest -q python/tests/test_head_options.py python/tests/test_repro.py

soak-marathon: $(SOAK)
	$(SOAK) marathon --minutes 120

# What a loaded coordinator answers, so without faults in it and optimised.
soak-scale:
	cargo build --locked --release -p backtape-soak
	target/release/soak scale
	target/release/soak manifest
	target/release/soak hostile
	target/release/soak fail-open

# P10: reports that are durable, beside grpcio and torch's TCPStore, which are not.
WIRE := $(VENV)-peers-wire
$(WIRE)/.installed: $(VENV)-torch/.tools benches/peers/requirements-wire.txt
	$(PYTHON) -m venv $(WIRE)
	site='import site; print(site.getsitepackages()[0])'; \
		$(VENV)-torch/bin/python -c "$$site" > "$$($(WIRE)/bin/python -c "$$site")/torch.pth"
	$(WIRE)/bin/python -m pip install --quiet --disable-pip-version-check -r benches/peers/requirements-wire.txt
	touch $@

bench-reports: $(WIRE)/.installed
	cargo build --locked --release -p backtape-soak
	SOAK=target/release/soak $(WIRE)/bin/python benches/peers/reports.py

# P5: a rank's file on its way to a coordinator, beside grpcio, Arrow Flight and a raw connection.
bench-stream: $(WIRE)/.installed
	cargo build --locked --release -p backtape-soak
	SOAK=target/release/soak $(WIRE)/bin/python benches/peers/stream.py

wheel: $(VENV)/.wheel

# Tools first: they change less often than the sources.
$(VENV)/.tools: python/requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r python/requirements-dev.txt
	touch $@

$(VENV)/.wheel: $(VENV)/.tools $(SOURCES)
	rm -rf $(VENV)/wheels
	$(BIN)/maturin build --locked --release --quiet --manifest-path python/Cargo.toml --out $(VENV)/wheels
	touch $@

# What the tests install: built with the profile of `cargo test`, of which it takes most of its
# crates. The release takes minutes more.
$(VENV)/.wheel-dev: $(VENV)/.tools $(SOURCES)
	rm -rf $(VENV)/wheels-dev
	$(BIN)/maturin build --locked --quiet --manifest-path python/Cargo.toml --out $(VENV)/wheels-dev
	touch $@

# Of the two wheels the environment holds the one that was installed last.
$(VENV)/.installed: $(VENV)/.wheel
	$(VENV)/$(INSTALL) $(VENV)/wheels/*.whl
	rm -f $@-dev && touch $@

$(VENV)/.installed-dev: $(VENV)/.wheel-dev
	$(VENV)/$(INSTALL) $(VENV)/wheels-dev/*.whl
	rm -f $(@:-dev=) && touch $@

# All but the lines of a GPU (bench-gpu): one after the other, as each wants the machine for itself.
# An hour or more; `make -k bench` goes on after one whose peers do not install.
bench: bench-loss-head bench-replay bench-compare bench-algebra bench-inactive bench-attached bench-scalars bench-blocking bench-step \
	bench-durable bench-small bench-stream bench-reports bench-false-alarms bench-causes bench-step-causes \
	bench-step-threads bench-step-false-alarms bench-step-cost bench-search bench-trainers

bench-loss-head:
	cargo bench --locked -p backtape-replayer --bench loss_head

# P8 and P9 of the benchmarks: the replay against JAX and torch, and a whole replay beside its f64
# products. The large sizes take minutes; torch lies in an environment of its own.
PEERS := .venv-peers
bench-replay: $(PEERS)/.installed $(VENV)/.installed
	cargo build --locked --release -p backtape-replayer --bin replay
	$(BIN)/python benches/whole_replay.py
	$(PEERS)/bin/python benches/peers/loss_head.py
	T=8192 REPEATS=3 $(PEERS)/bin/python benches/peers/loss_head.py

$(PEERS)/.installed: benches/peers/requirements.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -r benches/peers/requirements.txt
	touch $@

# Each peer in its own environment; one that does not install is named and left out.
$(VENV)-numpy/.installed:
	$(PYTHON) -m venv $(VENV)-numpy
	$(VENV)-numpy/bin/python -m pip install --quiet --disable-pip-version-check numpy ml_dtypes
	touch $@

$(VENV)-msprobe/.installed:
	$(PYTHON) -m venv $(VENV)-msprobe
	-$(VENV)-msprobe/bin/python -m pip install --quiet --disable-pip-version-check ml_dtypes mindstudio-probe
	touch $@

bench-compare: $(VENV)-numpy/.installed $(VENV)-msprobe/.installed
	NUMPY_PYTHON=$(CURDIR)/$(VENV)-numpy/bin/python MSPROBE_PYTHON=$(CURDIR)/$(VENV)-msprobe/bin/python \
		cargo bench --locked -p backtape-replayer --bench compare

# The replay of a step's algebra beside a memcpy of the same bytes, and beside a loop that computes this
# one step and judges nothing; SIZE=1e9 for a billion elements.
bench-algebra: $(VENV)/.installed
	$(BIN)/python benches/algebra.py

# What backtape costs a job that records nothing.
bench-inactive: $(VENV)/.installed
	$(BIN)/python python/benches/inactive.py

# What an attachment costs a torch job at the steps that it does not record.
bench-attached: $(VENV)-torch/.installed
	$(VENV)-torch/bin/python python/benches/attached.py

# What recording scalars costs: inactive, active, and as a share of a small step.
bench-scalars: $(VENV)/.installed
	$(BIN)/python python/benches/scalars.py

# Peers of P3 and P4, beside the torch of the tests: a second copy would be gigabytes.
$(VENV)-bench/.installed: $(VENV)-torch/.installed python/benches/requirements.txt
	$(PYTHON) -m venv $(VENV)-bench
	site='import site; print(site.getsitepackages()[0])'; \
		$(VENV)-torch/bin/python -c "$$site" > "$$($(VENV)-bench/bin/python -c "$$site")/torch.pth"
	$(VENV)-bench/bin/python -m pip install --quiet --disable-pip-version-check -r python/benches/requirements.txt
	touch $@

# P4: how long a snapshot of 1 GiB holds the training thread up, in torch and in jax.
bench-blocking: $(VENV)-bench/.installed
	$(VENV)-bench/bin/python python/benches/blocking.py

# P1: 1 GiB durable, with hash and manifest.
bench-durable: $(VENV)-bench/.installed
	$(VENV)-bench/bin/python python/benches/durable.py

# P2: 20,000 small tensors durable.
bench-small: $(VENV)-bench/.installed
	$(VENV)-bench/bin/python python/benches/small.py

# P3: what recording adds to a training step in torch.
bench-step: $(VENV)-bench/.installed
	$(VENV)-bench/bin/python python/benches/step_time.py
	$(VENV)-bench/bin/python python/benches/everything.py

# What recording the step's algebra adds to the step of a job of eight ranks; ROUNDS, RANKS and TOKENS
# choose less or more.
bench-step-cost: $(VENV)-torch/.installed
	$(VENV)-torch/bin/python python/benches/step_cost.py

# The GPU lines: the loss head against CCE, Liger-Kernel, torch and XLA, staging, the checksum, a dump to
# the GPU. Peers install one by one, and what does not is a row with its reason. XLA's CUDA is not
# torch's. OPTIONS go to it: OPTIONS='--lines loss --rounds 3'.
GPU_BENCH := $(VENV)-bench-gpu
GPU_REFERENCE = env LD_LIBRARY_PATH=$$(echo $(CUDA_LIBS)):$$LD_LIBRARY_PATH \
	cargo bench --quiet --locked -p backtape-replayer --bench device --
bench-gpu: $(if $(GPU),$(GPU_BENCH)/.installed $(GPU_BENCH)-xla/.installed $(CUDA)/.installed-gpu)
ifeq ($(GPU),)
	@echo "no GPU: nothing measured"
else
	cargo bench --quiet --locked -p backtape-replayer --bench device --no-run
	PYTHONPATH=python/benches $(GPU_BENCH)/bin/python -m gpu --reference "$(GPU_REFERENCE)" \
		--xla-python $(CURDIR)/$(GPU_BENCH)-xla/bin/python $(OPTIONS)
endif

$(GPU_BENCH)/.installed: $(VENV)-torch/.installed python/requirements-bench-gpu.txt
	$(PYTHON) -m venv $(GPU_BENCH)
	site='import site; print(site.getsitepackages()[0])'; \
		$(VENV)-torch/bin/python -c "$$site" > "$$($(GPU_BENCH)/bin/python -c "$$site")/torch.pth"
	-grep -v '^#' python/requirements-bench-gpu.txt | xargs -n 1 \
		$(GPU_BENCH)/bin/python -m pip install --quiet --disable-pip-version-check
	touch $@

$(GPU_BENCH)-xla/.installed: python/requirements-bench-gpu-xla.txt $(VENV)/.wheel
	$(PYTHON) -m venv $(GPU_BENCH)-xla
	-$(GPU_BENCH)-xla/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	-$(GPU_BENCH)-xla/$(INSTALL) $(VENV)/wheels/*.whl
	touch $@

# How often a clean job is called diverged; BACKTAPE_RUNS jobs from BACKTAPE_SEED on.
bench-false-alarms:
	cargo test --locked -p backtape --test backtape -- --ignored --nocapture --exact false_alarms::the_whole_campaign

# The planted-fault corpus: what the replay says of each cause. DRAWS, SEED and CAUSE choose less
# or more; PUBLISH=1 writes docs/causes-table.md.
bench-causes: $(VENV)/.installed
	cargo build --locked --release -p backtape-replayer --bin replay
	$(BIN)/python tests/corpus/run.py $(if $(DRAWS),--draws $(DRAWS)) $(if $(SEED),--seed $(SEED)) \
		$(if $(CAUSE),--cause $(CAUSE)) $(if $(PART),--part $(PART)) $(if $(PUBLISH),--publish)

# The corpus of faults planted in the step of jobs in torch, or in jax with FRAMEWORK=jax: what the
# replay says of each. DRAWS, SEED, FAULT and PART (develop, held-out) choose less or more.
STEP_PYTHON = $(if $(filter jax,$(FRAMEWORK)),$(BIN),$(VENV)-torch/bin)/python
bench-step-causes: $(if $(filter jax,$(FRAMEWORK)),$(VENV)/.installed-dev,$(VENV)-torch/.installed)
	cargo build --locked --release -p backtape-replayer --bin replay
	$(STEP_PYTHON) tests/step_corpus/run.py $(if $(FRAMEWORK),--framework $(FRAMEWORK)) \
		$(if $(DRAWS),--draws $(DRAWS)) $(if $(SEED),--seed $(SEED)) $(if $(FAULT),--fault $(FAULT)) \
		$(if $(PART),--part $(PART))

# Clean steps, simulated: how many are called wrong. RUNS, SEED and FIRST choose which; FRAMEWORK=jax
# draws chains of optax.
bench-step-false-alarms: $(if $(filter jax,$(FRAMEWORK)),$(VENV)/.installed,$(VENV)-torch/.installed)
	RAYON_NUM_THREADS=1 $(STEP_PYTHON) tests/step_campaign/run.py $(if $(FRAMEWORK),--framework $(FRAMEWORK)) \
		$(if $(RUNS),--runs $(RUNS)) $(if $(SEED),--seed $(SEED)) $(if $(FIRST),--first $(FIRST))

# Public threads whose gradients or updates were wrong, rebuilt as jobs in torch and jax: what the replay
# says of each. ONLY chooses one, PUBLISH=1 writes docs/step-threads.md.
bench-step-threads: $(VENV)-torch/.installed $(VENV)/.installed-dev
	cargo build --locked --release -p backtape-replayer --bin replay
	$(VENV)-torch/bin/python tests/step_threads/run.py --jax $(BIN)/python $(if $(ONLY),--only $(ONLY)) \
		$(if $(PUBLISH),--publish)

# Loss heads of public training codes, from checkouts below SOURCES that are got from outside
# (tests/foreign/sources.py says how they lie there); ONLY, DRAWS and SEED choose, PUBLISH=1 writes
# docs/foreign-heads.md.
bench-foreign: $(VENV)-torch/.installed-dev
	$(VENV)-torch/bin/python tests/foreign/run.py --sources $(SOURCES) $(if $(ONLY),--only $(ONLY)) \
		$(if $(DRAWS),--draws $(DRAWS)) $(if $(SEED),--seed $(SEED)) $(if $(PUBLISH),--publish)

# What the search for causes costs beside the replay; DUMPS chooses other dumps.
bench-search: $(VENV)/.installed
	cargo build --locked --release -p backtape-replayer --bin replay
	$(BIN)/python python/benches/search.py $(DUMPS)

# docs/pictures: what each cause looks like, drawn from the planted-fault corpus; minutes.
pictures: $(VENV)/.installed-dev
	$(BIN)/python python/docs/pictures.py

# docs/step-causes.md and its pictures: jobs in torch with each fault of the step, trained and replayed.
# CAUSE chooses one.
step-causes: $(VENV)-torch/.installed-dev
	REPLAY=$(VENV)-torch/bin/replay $(VENV)-torch/bin/python python/docs/step_causes.py $(CAUSE)

# docs/api.md, from the docstrings.
api:
	$(PYTHON) python/docs/api.py

clean:
	rm -rf target $(VENV) $(VENV)-* demo
