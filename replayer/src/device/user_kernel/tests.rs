//! A user's kernel with every fault that the guards are there for, on every machine.

use std::path::PathBuf;

use super::declared::{Declared, Sizes};
use super::guarded::Given;
use super::launch::Code;
use super::*;
use crate::device::tests::{cuda, host};
use crate::kernels::fixture::Fixture;

/// `sum_q[t] = g[t] * sum over d of q[t, d]`, for the stage dq: a row of q times g.
const RIGHT: &str = r#"
#ifdef __cplusplus
extern "C"
#endif
// backtape: mine(q: f32, g: f32, labels: i32, dq: f32, n: i32, d: i32, scale: f64)
//           grid(n / 4) block(4)
__global__ void mine(const float *q, const float *g, const int *labels, float *dq, int n, int d,
                     double scale) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= n) return;
    for (int i = 0; i < d; i++) dq[t * d + i] = labels[t] < 0 ? 0.0f : (float)scale * g[t] * q[t * d + i];
}
"#;

fn kernel(source: &str) -> Kernel {
    let declared = Declared::read(source, "mine", Stage::Dq).unwrap();
    let code = Code::Cuda { file: "mine.cu".into(), source: source.into() };
    Kernel {
        stage: Stage::Dq,
        name: "dq=mine.cu:mine".into(),
        entry: "mine".into(),
        code,
        declared,
    }
}

fn given(source: &str) -> Vec<Given> {
    let fixture = Fixture::new(10, 3, 8, 7);
    let g = fixture.g_lse_f64();
    let unit = Unit { head: fixture.inputs(), lse: &g, g: &g, stage: Stage::Dq };
    let kernel = kernel(source);
    let mut all = vec![run(host(), &kernel, &unit).unwrap()];
    all.extend(cuda().map(|cuda| run(cuda, &kernel, &unit).unwrap()));
    all
}

/// What the guards say of the right kernel with one change.
fn findings_with(from: &str, to: &str) -> Vec<String> {
    assert!(RIGHT.contains(from), "{from}");
    let mut all = given(&RIGHT.replace(from, to));
    let findings = all.pop().unwrap().findings;
    assert!(all.iter().all(|one| one.findings == findings), "{all:?}");
    findings
}

#[test]
fn a_right_kernel_gives_its_values_and_no_finding() {
    let fixture = Fixture::new(10, 3, 8, 7);
    for given in given(RIGHT) {
        assert_eq!(given.findings, Vec::<String>::new());
        for t in 0..10 {
            for i in 0..3 {
                let counted = if fixture.labels[t] == crate::kernels::IGNORED { 0.0 } else { 1.0 };
                let wanted = counted * fixture.g_lse[t] * fixture.q(t)[i];
                assert_eq!(given.values[t * 3 + i], f64::from(wanted));
            }
        }
    }
}

#[test]
fn elements_that_are_never_written_are_counted_and_the_first_is_named() {
    assert_eq!(
        findings_with("i < d; i++", "i < d - 1; i++"),
        ["10 of 30 elements are never written, the first is [0, 2]"]
    );
}

#[test]
fn an_output_that_is_added_to_before_it_is_written_is_told() {
    let adding = RIGHT.replace("dq[t * d + i] =", "dq[t * d + i] +=");
    assert_ne!(adding, RIGHT);
    let mut all = given(&adding).into_iter().map(|given| given.findings);
    // Of the token that takes no part: nothing but 0 is added, so a CPU leaves the pattern there.
    let by_host = [
        "3 of 30 elements are never written, the first is [3, 0]",
        "27 of 30 elements depend on what the output held before, the first is [0, 0]",
    ];
    assert_eq!(all.next().unwrap(), by_host);
    // A GPU has one NaN for all that it adds to one, so that element is written too.
    let by_gpu = ["30 of 30 elements depend on what the output held before, the first is [0, 0]"];
    assert!(all.all(|findings| findings == by_gpu || findings == by_host));
}

#[test]
fn a_read_beyond_an_input_is_told_on_both_sides() {
    let beyond =
        ["1 of 30 elements depend on what lies beyond the ends of an input, the first is [9, 2]"];
    assert_eq!(findings_with("g[t] * q[t * d + i]", "g[t] * q[t * d + i + 1]"), beyond);
    let before =
        ["1 of 30 elements depend on what lies beyond the ends of an input, the first is [0, 0]"];
    assert_eq!(findings_with("g[t] * q[t * d + i]", "g[t] * q[t * d + i - 1]"), before);
}

#[test]
fn writes_outside_of_the_output_are_told() {
    // In the guards of run 4 alone zeros would be lost; those of NaN show them.
    assert_eq!(
        findings_with("if (t >= n) return;", ""),
        ["it writes beyond the ends of its output"]
    );
    assert_eq!(
        findings_with("for (int", "((float *)g)[t] = 7.0f; for (int"),
        ["it writes to g or around it"]
    );
}

#[test]
fn a_kernel_that_is_not_deterministic_is_told() {
    let wavering = RIGHT.replace("#ifdef", "__device__ static float runs;\n#ifdef");
    let wavering = wavering
        .replace("if (t >= n) return;", "if (t >= n) return; if (t == 0) runs += 1.0f;")
        .replace("g[t] * q", "(t == 0 ? runs : 1.0f) * g[t] * q");
    for given in given(&wavering) {
        assert_eq!(
            given.findings,
            ["3 of 30 elements differ between two runs, the first is [0, 0]"]
        );
    }
}

#[test]
fn a_declaration_says_arguments_types_and_the_grid() {
    let text = ";; backtape: mine(q: bf16, dk: f32, n: i64)\n;; grid(v / 16, n, 3) block(8, 4) shared(1024)\n";
    let declared = Declared::read(text, "mine", Stage::Dk).unwrap();
    let sizes = Sizes { n: 5, d: 3, v: 33, valid: 30 };
    assert_eq!(declared.grid(&sizes).unwrap(), [3, 5, 3]);
    assert_eq!(declared.block(), [8, 4, 1]);
    assert_eq!((declared.arguments.len(), declared.shared), (3, 1024));
    let refused = |text: &str| Declared::read(text, "mine", Stage::Dk).unwrap_err();
    for (text, wanted) in [
        ("int x;", "no comment declares it"),
        ("// backtape: yours(dk: f32) grid(1) block(1)", "no comment declares it"),
        ("// backtape: mine(dk: f32", "does not end"),
        ("// backtape: mine(q: f32) grid(1) block(1)", "name dk 0 times"),
        ("// backtape: mine(dk: f32, dk: f32) grid(1) block(1)", "name dk 2 times"),
        ("// backtape: mine(dk) grid(1) block(1)", "has no type"),
        ("// backtape: mine(dk: float) grid(1) block(1)", "none of bf16"),
        ("// backtape: mine(dk: i32) grid(1) block(1)", "must be a float"),
        ("// backtape: mine(dk: f32, n: f32) grid(1) block(1)", "must be i32 or i64"),
        (
            "// backtape: mine(dk: f32, x: f32) grid(1) block(1)",
            "neither the stage dk nor one of q",
        ),
        ("// backtape: mine(dk: f32) block(1)", "no grid"),
        ("// backtape: mine(dk: f32) grid(n)", "no block"),
        ("// backtape: mine(dk: f32) grid(n / 0) block(1)", "no number above 0"),
        ("// backtape: mine(dk: f32) grid(x) block(1)", "no number above 0"),
        ("// backtape: mine(dk: f32) grid(1,1,1,1) block(1)", "one to three"),
    ] {
        assert!(refused(text).contains(wanted), "{text}: {}", refused(text));
    }
}

#[test]
fn a_file_that_is_no_kernel_is_refused_by_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| -> PathBuf {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let line = "// backtape: mine(dk: f32) grid(1) block(1)";
    for (name, text) in [("a.cu", line), ("a.ptx", line), ("a.cubin.args", line)] {
        file(name, text);
    }
    let read = |name: &str| Kernel::read(Stage::Dk, &folder.path().join(name), "mine");
    for name in ["a.cu", "a.ptx", "a.cubin"] {
        assert!(read(name).unwrap().name.ends_with(&format!("{name}:mine")));
    }
    let said = |name: &str| read(name).unwrap_err().to_string();
    assert!(said("a.so").ends_with("a.so is neither .cu, .ptx, .cubin nor .fatbin"));
    assert!(said("b.cu").ends_with("b.cu cannot be read"));
    assert!(said("a.fatbin").contains("a.fatbin.args cannot be read"));
    file("c.cu", "int x;");
    assert!(said("c.cu").contains("the kernel mine of") && said("c.cu").contains("no comment"));
}

#[test]
fn an_input_is_never_narrowed_in_silence() {
    let fixture = Fixture::new(10, 3, 8, 7);
    let g = fixture.g_lse_f64();
    let unit = Unit { head: fixture.inputs(), lse: &g, g: &g, stage: Stage::Dq };
    let narrow = kernel(&RIGHT.replace("mine(q: f32", "mine(q: bf16"));
    let refused = run(host(), &narrow, &unit).unwrap_err().to_string();
    assert!(refused.contains("takes q as bf16, and it was dumped as f32"), "{refused}");
}
