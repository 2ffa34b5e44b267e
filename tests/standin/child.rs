//! Tests of a library that run in a process of their own, which has the stand-in.

#[path = "mod.rs"]
mod libraries;

use std::ffi::{CString, c_char, c_int, c_long};
use std::process::Output;

/// Runs tests of this binary on the stand-in; how many there were.
pub(crate) fn run(tests: &[&str], set: &[(&str, &str)]) -> usize {
    let this = std::env::current_exe().expect("the path of this test");
    let mut child = libraries::command(&this);
    child.env("BACKTAPE_TEST_GPU", "1").env(HERE, "1").args(tests);
    child.envs(set.iter().map(|(name, value)| (format!("BACKTAPE_STANDIN_{name}"), value)));
    let Output { status, stdout, stderr } = child.output().expect("this test runs itself");
    let (out, err) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{tests:?} {set:?}: {status}\n{out}\n{err}");
    let passed = out.split("test result: ok. ").nth(1).and_then(|rest| rest.split(' ').next());
    passed.and_then(|passed| passed.parse().ok()).expect("a count of tests")
}

/// Set where this process has the stand-in in the place of NVIDIA's libraries.
const HERE: &str = "BACKTAPE_TEST_STANDIN";

/// Whether this process has it.
pub(crate) fn is_here() -> bool {
    std::env::var_os(HERE).is_some()
}

/// The stand-in's own functions: which call is to fail.
pub(crate) struct Calls(libloading::Library);

impl Calls {
    /// Of the stand-in that this process has, if it has one.
    pub(crate) fn here() -> Option<Calls> {
        // SAFETY: the stand-in's library, which has no initialisers.
        is_here()
            .then(|| Calls(unsafe { libloading::Library::new("libcuda.so.1") }.expect("it loads")))
    }

    /// From now on call number `nth` of this function fails; none where it is 0.
    pub(crate) fn fail(&self, function: &str, nth: i64) {
        type Fail = unsafe extern "C" fn(*const c_char, c_long, c_int);
        let name = CString::new(function).expect("a name");
        // The driver's unknown error; 1 is an error in every other library.
        let driver = function.starts_with("cu") && !function.starts_with("cublas");
        // SAFETY: `standin_fail` of tests/standin/calls.c.
        unsafe {
            let fail = self.0.get::<Fail>("standin_fail").expect("it is the stand-in");
            fail(name.as_ptr(), nth, if driver { 999 } else { 1 });
        }
    }

    /// How often it was called since.
    pub(crate) fn calls(&self, function: &str) -> i64 {
        type Counted = unsafe extern "C" fn(*const c_char) -> c_long;
        let name = CString::new(function).expect("a name");
        // SAFETY: `standin_calls`, likewise.
        unsafe {
            self.0.get::<Counted>("standin_calls").expect("it is the stand-in")(name.as_ptr())
        }
    }
}
