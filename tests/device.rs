//! `replay --device`: what a device computes is what the replay judges with, and without one the
//! CPU computes, and that is said.
//!
//! No GPU is needed here: the device of these tests is this process, so a report must be that of
//! the CPU to the last digit, and one runs on the stand-in of NVIDIA's libraries (`tests/standin`).
//! The kernels are tested where they are, `replayer/src/device`.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use backtape::role::Role;
use backtape_replayer::compare::RowTally;
use backtape_replayer::compare::plane::PlaneStage;
use backtape_replayer::device::{
    BackwardWalk, Comparison, Description, Device, DeviceError, Given, Kept, KeptPlane, Kernel,
    PlaneComparison, Unit,
};
use backtape_replayer::dump::Selection;
use backtape_replayer::head::Stage;
use backtape_replayer::kernels::policy::{self, DkParts, DqParts, Policy, PolicyForward};
use backtape_replayer::kernels::reference::{
    self, Backward, DkBlock, DkSums, ForwardSums, PlaneTile, TermNoise, Upstream,
};
use backtape_replayer::kernels::{Cotangents, HeadInputs, NoProgress, Precision, Progress, Tiles};
use backtape_replayer::postmortem;
use backtape_replayer::report::text;

use crate::support::job::options::Extras;
use crate::support::job::{Fault, Float, Job};
use crate::support::{dump, program};

/// This process as a device, which counts what it is asked for, and may fail.
struct Here {
    description: Description,
    passes: [AtomicUsize; 8],
    /// The pass that fails: its place in `passes`, and how many of it are done before.
    fails: Option<(usize, usize)>,
}

impl Here {
    fn new(fails: Option<(usize, usize)>) -> Here {
        let description = Description {
            name: "this process".into(),
            compiler: "rustc".into(),
            products: "gemm".into(),
        };
        Here { description, passes: Default::default(), fails }
    }

    fn pass(&self, which: usize) -> Result<(), DeviceError> {
        let before = self.passes[which].fetch_add(1, Ordering::Relaxed);
        match self.fails {
            Some(fails) if fails == (which, before) => Err(DeviceError::Call {
                what: "copying to it".into(),
                why: "the cable was pulled".into(),
            }),
            _ => Ok(()),
        }
    }
}

impl Device for Here {
    fn description(&self) -> &Description {
        &self.description
    }

    fn forward(
        &self,
        inputs: &HeadInputs,
        progress: &dyn Progress,
    ) -> Result<ForwardSums, DeviceError> {
        self.pass(0)?;
        let mut sums = ForwardSums::zeros(inputs.q.rows);
        sums.take(inputs, (Tiles::default(), progress), None);
        Ok(sums)
    }

    fn backward<'a>(
        &'a self,
        inputs: &HeadInputs,
        _rows: usize,
        noise: &TermNoise,
    ) -> Result<Box<dyn BackwardWalk + 'a>, DeviceError> {
        Ok(Box::new(Walk { on: self, held: Backward::zeros(inputs, noise) }))
    }

    /// As much as the CPU takes at a time: what is found is summed in its order.
    fn plane_bytes(&self) -> Result<usize, DeviceError> {
        Ok(32 << 20)
    }

    fn plane<'a>(
        &'a self,
        inputs: &HeadInputs,
        upstream: Upstream,
        (stage, progress): (PlaneStage, &dyn Progress),
    ) -> Result<Box<dyn KeptPlane + 'a>, DeviceError> {
        self.pass(2)?;
        let (Upstream { lse, cotangents, noise }, vocab) = (upstream, inputs.k.rows);
        let [mut values, mut variances] = [(); 2].map(|()| vec![0.0; inputs.q.rows * vocab]);
        let on_tile = &mut |tile: PlaneTile| {
            for (at, row) in tile.tokens.clone().enumerate() {
                for (column, class) in tile.cols.clone().enumerate() {
                    let (from, to) = (at * tile.cols.len() + column, row * vocab + class);
                    (values[to], variances[to]) = match stage {
                        PlaneStage::Logits => (tile.logits[from], tile.logits_var[from]),
                        PlaneStage::Logprobs => {
                            (tile.logits[from] - lse[row], tile.logits_var[from])
                        }
                        PlaneStage::Dlogits => (tile.dlogits[from], tile.dlogits_var[from]),
                    };
                }
            }
        };
        let tiles = Tiles::default();
        reference::plane(inputs, lse, &cotangents, noise, tiles, progress, on_tile);
        Ok(Box::new(LyingPlane { on: self, values, variances }))
    }

    fn policy_forward(
        &self,
        policy: &Policy,
        inputs: &HeadInputs,
        (tiles, progress): (Tiles, &dyn Progress),
    ) -> Result<PolicyForward, DeviceError> {
        self.pass(3)?;
        Ok(policy::forward(policy, inputs, tiles, progress))
    }

    fn policy_backward(
        &self,
        policy: &Policy,
        inputs: &HeadInputs,
        (lse, cotangents): (&[f64], &Cotangents<f64>),
        (tiles, progress): (Tiles, &dyn Progress),
        on_dk: &mut dyn FnMut(DkParts),
    ) -> Result<DqParts, DeviceError> {
        self.pass(4)?;
        Ok(policy::backward(policy, inputs, lse, cotangents, tiles, progress, on_dk))
    }

    fn policy_plane(
        &self,
        policy: &Policy,
        inputs: &HeadInputs,
        (lse, cotangents): (&[f64], &Cotangents<f64>),
        (tiles, progress): (Tiles, &dyn Progress),
        on_tile: &mut dyn FnMut(policy::PlaneTile),
    ) -> Result<(), DeviceError> {
        self.pass(5)?;
        policy::plane(policy, inputs, lse, cotangents, tiles, progress, on_tile);
        Ok(())
    }

    /// The kernel's stage by the reference; that a device runs the kernel itself is tested where
    /// devices are.
    fn user_kernel(&self, kernel: &Kernel, unit: &Unit) -> Result<Given, DeviceError> {
        let inputs = &unit.head;
        let label: Vec<f64> = unit.g.iter().map(|g| -g).collect();
        let smooth = vec![0.0; unit.g.len()];
        let cotangents = Cotangents { lse: unit.g, label: &label, smooth: &smooth };
        let (noise, tiles) = (TermNoise::default(), Tiles::default());
        let mut dk = Vec::new();
        let mut take = |block: DkBlock| {
            dk.extend(block.dk_lse.iter().zip(block.dk_label).map(|(lse, label)| lse + label));
        };
        let given = (unit.lse, &cotangents, &noise);
        let dq = reference::backward(
            inputs,
            given.0,
            given.1,
            given.2,
            (tiles, reference::Keep::Both, &NoProgress),
            &mut take,
        );
        let values = match kernel.stage {
            Stage::Dk => dk,
            _ => dq.dq_lse.iter().zip(&dq.dq_label).map(|(lse, label)| lse + label).collect(),
        };
        let findings = vec!["1 of 2 elements are never written, the first is [0, 0]".into()];
        Ok(Given { values, precision: Some(Precision::F32), findings })
    }
}

/// Holds dq until the end, as a device does: what is read of its dense part before is zeros.
struct Walk<'a> {
    on: &'a Here,
    held: Backward,
}

impl BackwardWalk for Walk<'_> {
    fn slab(
        &mut self,
        inputs: &HeadInputs,
        upstream: Upstream,
        (tiles, progress): (Tiles, &dyn Progress),
        dq: &mut Backward,
    ) -> Result<DkSums, DeviceError> {
        self.on.pass(1)?;
        let Upstream { lse, cotangents, noise } = upstream;
        let mut sums = DkSums::zeros(inputs, noise, tiles);
        let given = (lse, &cotangents, noise);
        let onto = (&mut self.held, &mut sums);
        reference::backward_onto(
            onto,
            (inputs, 0),
            given,
            (tiles, reference::Keep::Both, progress),
        );
        // The label path is the host's.
        dq.dq_label.clone_from(&self.held.dq_label);
        dq.dq_label_var.clone_from(&self.held.dq_label_var);
        dq.dq_label_rel_var.clone_from(&self.held.dq_label_rel_var);
        dq.dq_label_share.clone_from(&self.held.dq_label_share);
        Ok(sums)
    }

    fn slab_to_compare<'s>(
        &'s mut self,
        inputs: &'s HeadInputs,
        upstream: Upstream<'s>,
        tiles: (Tiles, &dyn Progress),
        dq: &mut Backward,
    ) -> Result<(DkSums, Box<dyn Kept + 's>), DeviceError> {
        let noise = *upstream.noise;
        let sums = self.slab(inputs, upstream, tiles, dq)?;
        let mut dense = [(); 5].map(|()| Vec::new());
        sums.clone().finish(&inputs.q, &noise, &mut |block| {
            let DkBlock { dk_lse, dk_lse_sq, dk_lse_var, dk_dropped, dk_confident, .. } = block;
            let parts = [dk_lse, dk_lse_sq, dk_lse_var, dk_dropped, dk_confident];
            dense.iter_mut().zip(parts).for_each(|(all, part)| all.extend(part));
        });
        Ok((sums, Box::new(Lying { on: self.on, dense })))
    }

    fn dq_to_compare(&mut self) -> Option<Box<dyn Kept + '_>> {
        let Backward { dq_lse, dq_lse_sq, dq_lse_var, dq_dropped, dq_confident, .. } = &self.held;
        let dense = [dq_lse, dq_lse_sq, dq_lse_var, dq_dropped, dq_confident].map(Vec::clone);
        Some(Box::new(Lying { on: self.on, dense }))
    }

    fn finish(self: Box<Self>, dq: &mut Backward) -> Result<(), DeviceError> {
        *dq = self.held;
        Ok(())
    }
}

/// Dense sums that lie on the device.
struct Lying<'a> {
    on: &'a Here,
    dense: [Vec<f64>; 5],
}

impl Kept for Lying<'_> {
    fn compare(&mut self, of: &Comparison) -> Result<Vec<RowTally>, DeviceError> {
        self.on.pass(6)?;
        Ok(of.here(self.dense.each_ref().map(|values| &values[..])))
    }
}

/// A plane that lies on the device, which emulates no policy there.
struct LyingPlane<'a> {
    on: &'a Here,
    values: Vec<f64>,
    variances: Vec<f64>,
}

impl KeptPlane for LyingPlane<'_> {
    fn compare(&mut self, of: &PlaneComparison) -> Result<Vec<RowTally>, DeviceError> {
        self.on.pass(7)?;
        Ok(of.here(&self.values, &self.variances))
    }

    fn energy(
        &mut self,
        _policy: &Policy,
        _inputs: &HeadInputs,
        _upstream: (&[f64], &Cotangents<f64>),
        _stored: (Option<Precision>, &dyn Progress),
    ) -> Result<Option<f64>, DeviceError> {
        Ok(None)
    }

    fn values(&mut self) -> Result<Vec<f64>, DeviceError> {
        Ok(self.values.clone())
    }
}

/// Every role that a dump holds.
const ALL: &[Role] = &[];

fn local(path: &Path) -> serde_json::Value {
    let report = postmortem::replay_report(path, &Selection::default(), ALL, None).unwrap();
    serde_json::to_value(&report).unwrap()
}

fn dumped(directory: &Path, name: &str, job: &Job) -> PathBuf {
    let path = directory.join(name);
    dump::write(&path, job.ranks as u32, &job.head(), &job.shards());
    path
}

/// Goal: every pass of the reference and of the policies goes to the device, and so do the comparisons of dq, dk
/// and the plane; dq is fetched at the end, and nothing else of the report changes.
#[test]
fn the_report_of_a_device_that_computes_alike_is_that_of_the_cpu() {
    let directory = tempfile::tempdir().unwrap();
    let jobs = [
        Job { tokens: 300, vocab: 4500, valid: 4491, seed: 3, ..Job::default() },
        Job { fault: Fault::LabelScatterBf16, ..Job::default() },
    ];
    let random = (0..10).map(Job::random);
    let mut passes = [0; 8];
    for (number, job) in jobs.into_iter().chain(random).enumerate() {
        let path = dumped(directory.path(), &format!("run-{number}"), &job);
        let device = Here::new(None);
        let report =
            postmortem::report_on_device(&path, &Selection::default(), ALL, &device).unwrap();
        let mut report = serde_json::to_value(&report).unwrap();
        let named = report.as_object_mut().unwrap().remove("device").unwrap();
        assert_eq!(named["name"], "this process");
        assert_eq!(named["fallback"], serde_json::Value::Null);
        let types = &named["policies"][0]["gradients"];
        assert!(types.as_str().is_some_and(|types| !types.is_empty()), "{named}");
        assert_eq!(report, local(&path), "{job:?}");
        for (all, of) in passes.iter_mut().zip(device.passes) {
            *all += of.into_inner();
        }
    }
    assert!(passes.iter().all(|&passes| passes > 0), "{passes:?}");
}

/// Goal: a device that fails ends the replay with what it said and what to do, whatever it was
/// doing.
#[test]
fn a_device_that_fails_is_one_sentence() {
    let directory = tempfile::tempdir().unwrap();
    let job = Job { tokens: 300, vocab: 4500, valid: 4491, seed: 3, ..Job::default() };
    let path = dumped(directory.path(), "run", &job);
    for which in [0, 1, 3, 4, 6] {
        let device = Here::new(Some((which, 1)));
        let failed =
            postmortem::report_on_device(&path, &Selection::default(), ALL, &device).unwrap_err();
        let said = format!("{:#}", anyhow::Error::new(failed));
        let wanted = "the device failed at copying to it: the cable was pulled; with --device cpu \
                      the replay needs no device";
        assert!(said.ends_with(wanted), "{said}");
    }
}

/// Goal: without a GPU the verdict is that of the CPU, and both the terminal and the report say
/// that no GPU computed and why.
#[test]
fn without_a_gpu_the_cpu_computes_and_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let path = dumped(directory.path(), "run", &Job::default());
    let json = directory.path().join("report.json");
    let ask = |device: &str| {
        let [path, json] = [&path, &json].map(|path| path.to_str().unwrap());
        let given = ["--step", "0", "--quiet", "--device", device, "--dump", path, "--json", json];
        program::replay(&given)
    };
    // A number that no machine has, so that the test is the same where there is a GPU.
    let asked = ask("cuda:4096");
    assert_eq!(asked.code, 0, "{asked:?}");
    let told = asked.stderr.trim_end();
    assert!(told.starts_with("replay: no CUDA device can be used: "), "{told}");
    assert!(told.ends_with("; the CPU computes the reference in its place"), "{told}");
    assert_eq!(told.lines().count(), 1, "{told}");
    let read =
        || -> serde_json::Value { serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap() };
    let mut report = read();
    let device = report.as_object_mut().unwrap().remove("device").unwrap();
    assert_eq!(device["name"], "cpu");
    assert!(told.contains(device["fallback"].as_str().unwrap()), "{device}");
    assert!(asked.stdout.contains("device    cpu: no CUDA device can be used"), "{asked:?}");
    assert_eq!(report, local(&path));
    let asked = ask("cpu");
    assert!(asked.code == 0 && asked.stderr.is_empty(), "{asked:?}");
    assert_eq!(read(), local(&path));
    let refused = ask("gpu");
    assert_eq!(refused.code, 2);
    assert!(refused.stderr.contains("cuda:N"), "{refused:?}");
}

/// Goal: from the command line to the report, on one GPU and on two, the verdicts are the CPU's.
/// Method: the stand-in of NVIDIA's libraries, which shows that our calls are as documented.
#[test]
fn on_the_stand_in_of_a_gpu_the_verdicts_are_those_of_the_cpu() {
    let directory = tempfile::tempdir().unwrap();
    let json = directory.path().join("report.json");
    // The worse of two microbatches is named, and both are as good as the emulated policy.
    let mut planes = Job { microbatches: 1, ..Job::default() };
    planes.options.extras =
        Extras { logits: true, dlogits: true, logprobs: true, ..Extras::default() };
    let jobs = [Job::default(), Job { fault: Fault::LabelScatterBf16, ..Job::default() }, planes];
    for (number, job) in jobs.into_iter().enumerate() {
        let path = dumped(directory.path(), &format!("run-{number}"), &job);
        let ask = |device: &str| {
            let [path, json] = [&path, &json].map(|path| path.to_str().unwrap());
            let given =
                ["--step", "0", "--quiet", "--device", device, "--dump", path, "--json", json];
            let asked = program::replay_on_standin(&given, &[("BACKTAPE_STANDIN_DEVICES", "2")]);
            assert_eq!(asked.stderr, "", "{device}: {asked:?}");
            let report = std::fs::read(json).unwrap();
            let mut report: serde_json::Value = serde_json::from_slice(&report).unwrap();
            // Without one there is nothing to name.
            let device = report.as_object_mut().unwrap().remove("device");
            let name = device.map_or(String::new(), |device| device["name"].to_string());
            (asked.code, name, report)
        };
        let (code, _, wanted) = ask("cpu");
        for (device, count) in [("cuda:1", 1), ("cuda:all", 2)] {
            let (got, name, report) = ask(device);
            assert_eq!(name.matches("stand-in").count(), count, "{name}");
            assert_eq!(got, code, "{device}");
            assert_same_words(device, &report, &wanted);
        }
    }
}

/// Goal: a right dk that was recorded as a sum alone agrees. What is allowed of it is told from the
/// sums of every unit: where these stayed on the device, it was called diverged. Method: dlogits
/// are stored in bf16 and dk in f32, and few rows are a label, so that nothing else allows as much.
#[test]
fn on_the_stand_in_of_a_gpu_a_dk_that_was_recorded_as_a_sum_alone_agrees() {
    let directory = tempfile::tempdir().unwrap();
    let mut job = Job { ranks: 1, microbatches: 1, tokens: 48, fused: false, ..Job::default() };
    (job.vocab, job.valid, job.width) = (600, 600, 16);
    job.options.layout.dk = Float::F32;
    let path = directory.path().join("run");
    let mut shards = job.shards();
    shards.retain(|shard| !(shard.name.starts_with("dk") && shard.partial));
    dump::write(&path, 1, &job.head(), &shards);
    let path = path.to_str().unwrap();
    let given = ["--step", "0", "--device", "cuda", "--causes", "none", "--dump", path];
    let asked = program::replay_on_standin(&given, &[]);
    assert_eq!(asked.code, 0, "{asked:?}");
    assert!(asked.stdout.contains("stand-in") && asked.stdout.contains("reduce"), "{asked:?}");
}

/// Sums in another order differ in their last digits; what is said of them does not.
fn assert_same_words(place: &str, got: &serde_json::Value, wanted: &serde_json::Value) {
    use serde_json::Value::{Array, Number, Object, String};
    match (got, wanted) {
        (Object(got), Object(wanted)) => {
            assert!(got.keys().eq(wanted.keys()), "{place}");
            for (name, value) in got {
                assert_same_words(&format!("{place} {name}"), value, &wanted[name]);
            }
        }
        (Array(got), Array(wanted)) => {
            assert_eq!(got.len(), wanted.len(), "{place}: {got:?}, not {wanted:?}");
            for (number, (got, wanted)) in got.iter().zip(wanted).enumerate() {
                assert_same_words(&format!("{place} {number}"), got, wanted);
            }
        }
        (Number(_), Number(_)) => {}
        (String(got), String(wanted)) => {
            let words = |text: &str| text.replace(|c: char| c.is_ascii_digit() || c == '.', "");
            assert_eq!(words(got), words(wanted), "{place}");
        }
        _ => assert_eq!(got, wanted, "{place}"),
    }
}

/// Goal: what a user's kernel gives is judged like a user's function, unit by unit, and what the
/// guards saw is in the report and on the terminal.
#[test]
fn a_kernel_of_the_users_is_judged_and_its_findings_are_told() {
    let directory = tempfile::tempdir().unwrap();
    let job = Job { fault: Fault::RankScaled(1.5), ..Job::default() };
    let path = dumped(directory.path(), "run", &job);
    for (stage, wrong) in [(Stage::Dk, true), (Stage::Dq, false)] {
        let file = directory.path().join("mine.cu");
        let declared = format!("// backtape: mine({stage}: f32) grid(1) block(1)");
        std::fs::write(&file, declared).unwrap();
        let kernel = Kernel::read(stage, &file, "mine").unwrap();
        let name = kernel.name.clone();
        let own = (vec![kernel], Box::new(Here::new(None)) as Box<dyn Device>);
        let report =
            postmortem::report_with_kernels(&path, &Selection::default(), ALL, own).unwrap();
        let [judged] = &report.variants[..] else { panic!("{:?}", report.variants) };
        assert_eq!((&judged.variant, judged.stage), (&name, stage.name()));
        assert!(judged.agrees, "{judged:?}");
        // What the job did to dk is not this; dq is.
        assert_eq!(judged.explains, Some(!wrong), "{judged:?}");
        let [told] = &report.kernels[..] else { panic!("{:?}", report.kernels) };
        assert_eq!(told.name, name);
        assert!(told.findings.len() >= judged.comparisons, "{told:?}");
        assert!(told.findings[0].starts_with("microbatch 0"), "{told:?}");
        let text = text::render(&report);
        assert!(text.contains("never written"), "{text}");
    }
}

/// Goal: a kernel that cannot run is said before the replay, in one sentence.
#[test]
fn a_kernel_that_cannot_run_is_refused_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let path = dumped(directory.path(), "run", &Job::default());
    let file = directory.path().join("mine.cu");
    let ask = |text: &str| {
        std::fs::write(&file, text).unwrap();
        let kernel = format!("dk={}:mine", file.display());
        program::replay(&["--step", "0", "--kernel", &kernel, "--dump", path.to_str().unwrap()])
    };
    let undeclared = ask("int x;");
    assert_eq!(undeclared.code, 2);
    assert!(undeclared.stderr.contains("cannot be called: no comment declares it"));
    let declared = ask("// backtape: mine(dk: f32) grid(1) block(1)");
    // Where there is a GPU the source is what is refused.
    assert_eq!(declared.code, 2);
    let why = ["--kernel needs a GPU: no CUDA device can be used", "could not be compiled"];
    assert!(why.iter().any(|why| declared.stderr.contains(why)), "{declared:?}");
}
