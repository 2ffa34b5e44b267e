//! The style and the layering of the repository, kept by a test.
//!
//! Goal: ARCHITECTURE's absences stay absent. Method: read every source file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Lines a source file may have.
const MAX_LINES: usize = 600;
/// Characters a line of code may have.
const MAX_COLUMNS: usize = 120;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn sources(folders: &[&str], extension: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for folder in folders {
        collect(&root().join(folder), extension, &mut found);
    }
    assert!(!found.is_empty(), "no {extension} files below {folders:?}");
    found.sort();
    found
}

fn collect(directory: &Path, extension: &str, found: &mut Vec<(String, String)>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, extension, found);
        } else if path.extension().is_some_and(|found| found == extension) {
            let name = path.strip_prefix(root()).unwrap().display().to_string();
            found.push((name, std::fs::read_to_string(&path).unwrap()));
        }
    }
}

const RUST: &[&str] = &["proto/src", "src", "dumper/src", "replayer/src", "python/src", "tests"];

#[test]
fn every_file_says_what_it_is_and_stays_readable() {
    let mut faults = Vec::new();
    for (name, text) in sources(RUST, "rs") {
        if !text.starts_with("//!") {
            faults.push(format!("{name}: no module header"));
        }
        if text.lines().count() > MAX_LINES {
            faults.push(format!("{name}: {} lines", text.lines().count()));
        }
        let long = text.lines().filter(|line| line.chars().count() > MAX_COLUMNS);
        let long = long.filter(|line| !line.contains('"')).count();
        if long > 0 {
            faults.push(format!("{name}: {long} lines over {MAX_COLUMNS} characters"));
        }
    }
    for (name, text) in sources(&["python/backtape", "examples"], "py") {
        if !text.trim_start_matches("#!/usr/bin/env python3\n").starts_with("\"\"\"") {
            faults.push(format!("{name}: no module docstring"));
        }
    }
    assert!(faults.is_empty(), "{faults:#?}");
}

#[test]
fn no_file_has_a_name_that_says_nothing() {
    for (name, _) in sources(RUST, "rs") {
        let stem = Path::new(&name).file_stem().unwrap().to_str().unwrap();
        let empty = ["util", "utils", "helper", "helpers", "common", "misc", "manager", "engine"];
        assert!(!empty.contains(&stem), "{name}");
    }
}

/// A name that only these places may mention.
fn only_in(word: &str, allowed: &[&str]) {
    for (name, text) in sources(RUST, "rs") {
        let here = allowed.iter().any(|place| name.starts_with(place)) || name == "tests/tidy.rs";
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        let used = code.into_iter().any(|line| line.contains(word));
        assert!(here || !used, "{name} names {word}, which belongs in {allowed:?}");
    }
}

#[test]
fn wire_types_stay_in_the_adapters() {
    only_in(
        "backtape_proto",
        &[
            "proto/",
            "src/coordinator/wire",
            "src/coordinator/service",
            "src/coordinator/server",
            "dumper/src/client",
            "tests/",
        ],
    );
}

#[test]
fn pyo3_is_named_in_the_python_crate_alone() {
    only_in("pyo3", &["python/"]);
}

#[test]
fn dumper_and_replayer_never_see_each_other() {
    only_in("backtape_dumper", &["dumper/", "python/", "tests/"]);
    only_in("backtape_replayer", &["replayer/", "python/", "tests/"]);
}

/// Layers of the replayer, in the order in which ARCHITECTURE.md names them.
fn layers() -> Vec<String> {
    let map = std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let row = map.lines().find(|line| line.starts_with("| `replayer` |")).unwrap();
    let row = row.split_once("binary").unwrap().0;
    row.split('`').skip(3).step_by(2).map(str::to_string).collect()
}

/// The modules of its own crate that a file's code names, comments and unit tests left out.
fn named_modules<'a>(text: &'a str) -> Vec<&'a str> {
    let code = text.split("#[cfg(test)]").next().unwrap();
    let code = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    let named = code.flat_map(|line| line.split("crate::").skip(1));
    let word = |after: &'a str| after.split(|c: char| !(c.is_lowercase() || c == '_')).next();
    named.filter_map(word).collect()
}

#[test]
fn a_layer_of_the_replayer_knows_only_those_before_it() {
    let layers = layers();
    let place = |name: &str| layers.iter().position(|layer| layer == name);
    let mut faults = Vec::new();
    for (file, text) in sources(&["replayer/src"], "rs") {
        let inside = file.strip_prefix("replayer/src/").unwrap();
        let own = inside.split('/').next().unwrap().trim_end_matches(".rs");
        let is_layered = !["lib", "bin"].contains(&own);
        if !is_layered || inside.contains("tests") || inside.ends_with("fixture.rs") {
            continue;
        }
        let Some(here) = place(own) else {
            faults.push(format!("{file}: ARCHITECTURE.md does not name {own}"));
            continue;
        };
        for module in named_modules(&text) {
            match place(module) {
                Some(there) if there > here => faults.push(format!("{file} names {module}")),
                None if !module.is_empty() => faults.push(format!("{file}: what is {module}?")),
                _ => {}
            }
        }
    }
    assert!(faults.is_empty(), "{faults:#?}");
}

/// Code of the files of the replay by their modules, comments and unit tests left out.
fn replay_files() -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for (file, text) in sources(&["replayer/src/replay"], "rs") {
        let inside = file.strip_prefix("replayer/src/replay/").unwrap().trim_end_matches(".rs");
        if inside.ends_with("tests") {
            continue;
        }
        let module = inside.trim_end_matches("/mod").replace('/', "::");
        let code = text.split("#[cfg(test)]").next().unwrap().lines();
        let code = code.filter(|line| !line.trim_start().starts_with("//"));
        found.insert(module, code.collect::<Vec<_>>().join("\n"));
    }
    found
}

/// The paths that a tree of `use` names.
fn expanded(tree: &str) -> Vec<String> {
    let Some((before, inside)) = tree.split_once('{') else { return vec![tree.trim().into()] };
    let inside = inside.trim_end().trim_end_matches('}');
    let (mut depth, mut parts) = (0, vec![String::new()]);
    for c in inside.chars() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        match c == ',' && depth == 0 {
            true => parts.push(String::new()),
            false => parts.last_mut().unwrap().push(c),
        }
    }
    let named = parts.iter().filter(|part| !part.trim().is_empty());
    named.flat_map(|part| expanded(part)).map(|path| before.trim().to_string() + &path).collect()
}

/// Every path of the code that may lead to another file.
fn paths(code: &str) -> Vec<String> {
    let part_of_path = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    let statements = code.split(';').filter_map(|statement| {
        let line = statement.rfind("use ").filter(|&at| {
            let before = statement[..at].rsplit('\n').next().unwrap().trim();
            before.is_empty() || before.starts_with("pub")
        })?;
        Some(expanded(&statement[line + 4..]))
    });
    let mut found: Vec<String> = statements.flatten().collect();
    for root in ["super::", "crate::replay::"] {
        for (at, _) in code.match_indices(root) {
            let starts = !code[..at].ends_with(part_of_path);
            let path = code[at..].split(|c: char| !part_of_path(c)).next().unwrap();
            found.extend(starts.then(|| path.trim_end_matches(':').to_string()));
        }
    }
    found
}

/// The file that a path leads to from a module: that of the longest module it begins with.
fn reached(path: &str, from: &str, files: &BTreeMap<String, String>) -> Option<String> {
    let mut own: Vec<&str> = from.split("::").filter(|module| *module != "mod").collect();
    let mut rest: Vec<&str> = path.split("::").map(str::trim).collect();
    if rest.starts_with(&["crate", "replay"]) {
        own.clear();
        rest.drain(..2);
    } else if rest[0] == "super" {
        while rest.first() == Some(&"super") {
            own.pop();
            rest.remove(0);
        }
    } else if !files.contains_key(&[&own[..], &rest[..1]].concat().join("::")) {
        return None; // of another crate or layer
    }
    let whole = [own, rest].concat();
    let prefixes = (1..=whole.len()).rev().map(|n| whole[..n].join("::"));
    let module = prefixes.into_iter().find(|module| files.contains_key(module));
    Some(module.unwrap_or_else(|| "mod".into()))
}

/// The types whose methods lie in several files.
const SPREAD: [&str; 4] = ["Replay", "Plan", "Judge", "Executor"];

/// Methods of these types that other files may call: type, and name.
fn methods(code: &str) -> Vec<(&'static str, String)> {
    let mut of = None;
    let mut found = Vec::new();
    for line in code.lines() {
        if line.starts_with("impl") || line.starts_with('}') {
            let head = line.trim_start_matches("impl<'a> ").trim_start_matches("impl ");
            of = SPREAD.into_iter().find(|name| head.starts_with(&format!("{name}<")));
        }
        if let (Some(of), true, Some((_, after))) =
            (of, line.starts_with("    pub"), line.split_once(" fn "))
        {
            let name = after.split(['(', '<']).next().unwrap();
            found.push((of, name.to_string()));
        }
    }
    found
}

/// Calls of methods: the word before the dot, and the method.
fn calls(code: &str) -> BTreeSet<(&str, &str)> {
    let word = |c: char| c.is_alphanumeric() || c == '_';
    let pieces: Vec<&str> = code.split('.').collect();
    let pairs = pieces.windows(2).filter_map(|pair| {
        let receiver = pair[0].trim_end().rsplit(|c| !word(c)).next()?;
        let (name, _) = pair[1].split_once('(')?;
        let name = name.split("::<").next()?;
        name.chars().all(word).then_some((receiver, name))
    });
    pairs.collect()
}

/// Which files of the replay each of them needs: by its imports, and by the methods it calls.
fn needs(files: &BTreeMap<String, String>) -> BTreeMap<String, BTreeSet<String>> {
    let all: Vec<_> = files
        .iter()
        .flat_map(|(file, code)| methods(code).into_iter().map(move |(of, name)| (of, name, file)))
        .collect();
    let of_file = |(file, code): (&String, &String)| {
        let mut needed: BTreeSet<String> =
            paths(code).iter().filter_map(|path| reached(path, file, files)).collect();
        let calls = calls(code);
        for (of, name, defined) in &all {
            let own = code.contains(&format!("fn {name}("));
            let called = |receiver: &str| calls.contains(&(receiver, name.as_str()));
            let called = called(&of.to_lowercase()) || (called("self") && !own);
            needed.extend(called.then(|| (*defined).clone()));
        }
        needed.remove(file);
        (file.clone(), needed)
    };
    files.iter().map(of_file).collect()
}

/// Goal: each file of the replay can be read once those that it needs were read.
#[test]
fn no_file_of_the_replay_is_in_a_circle() {
    let mut left = needs(&replay_files());
    loop {
        let known: BTreeSet<String> = left.keys().cloned().collect();
        let free = |needed: &BTreeSet<String>| needed.is_disjoint(&known);
        let before = left.len();
        left.retain(|_, needed| !free(needed));
        if left.len() == before {
            break;
        }
    }
    let stuck: BTreeSet<String> = left.keys().cloned().collect();
    left.values_mut().for_each(|needed| needed.retain(|other| stuck.contains(other)));
    assert!(left.is_empty(), "in a circle, or above one: {left:#?}");
}

/// Layers of the replay, lowest first, and the files of each, as docs/decisions/replay.md has them.
fn layers_of_the_replay() -> Vec<(String, Vec<String>)> {
    let page = std::fs::read_to_string(root().join("docs/decisions/replay.md")).unwrap();
    let section = page.split("## Layers").nth(1).unwrap().split("\n## ").next().unwrap();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    let row = |line: &str| {
        let mut names = line.split('`').skip(1).step_by(2).map(str::to_string);
        (names.next().unwrap(), names.collect())
    };
    rows.map(row).collect()
}

#[test]
fn a_layer_of_the_replay_knows_only_those_before_it() {
    let layers = layers_of_the_replay();
    let place = |file: &str| layers.iter().position(|(_, files)| files.iter().any(|f| f == file));
    let needs = needs(&replay_files());
    let mut faults = Vec::new();
    for (file, needed) in &needs {
        let Some(here) = place(file) else {
            faults.push(format!("docs/decisions/replay.md does not name {file}"));
            continue;
        };
        let above = needed.iter().filter(|other| place(other).is_some_and(|there| there > here));
        faults.extend(above.map(|other| format!("{file} needs {other}, of a later layer")));
    }
    let named = layers.iter().flat_map(|(_, files)| files);
    let gone = named.filter(|file| !needs.contains_key(*file));
    faults.extend(gone.map(|file| format!("docs/decisions/replay.md names {file}, which is none")));
    assert!(faults.is_empty(), "{faults:#?}");
}

#[test]
fn the_map_is_short_and_every_page_of_decisions_is_on_it() {
    let map = std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    assert!(map.len() <= 8192, "ARCHITECTURE.md has {} bytes", map.len());
    for (page, _) in sources(&["docs/decisions"], "md") {
        assert!(map.contains(&format!("({page})")), "{page} is not on the map");
    }
    let words = map.split('`').skip(1).step_by(2);
    for path in words.filter(|word| word.ends_with(".rs") || word.ends_with(".py")) {
        assert!(root().join(path).exists(), "there is no {path}");
    }
}

#[test]
fn kernels_do_no_io() {
    for (name, text) in sources(&["replayer/src/kernels"], "rs") {
        for word in [
            "std::fs",
            "std::io",
            "std::net",
            "tokio",
            "clap",
            "println!",
            "crate::dump",
            "crate::head",
        ] {
            assert!(!text.contains(word), "{name} names {word}");
        }
    }
}

#[test]
fn the_reference_shares_no_arithmetic_with_the_policies() {
    for (name, text) in sources(&["replayer/src/kernels/reference"], "rs") {
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        let shared = code
            .into_iter()
            .any(|line| line.contains("policy::") || line.contains("super::policy"));
        assert!(!shared, "{name} uses the policies");
    }
}

/// Faults on purpose are for the tests: what users build cannot have them.
#[test]
fn no_build_for_users_has_faults_in_it() {
    for folder in [".", "proto", "dumper", "replayer", "python"] {
        let path = root().join(folder).join("Cargo.toml");
        let text = std::fs::read_to_string(&path).unwrap();
        for line in text.lines().filter(|line| line.contains("faults")) {
            let own = folder == "." && line.starts_with("faults = ");
            let comment = line.starts_with('#');
            assert!(own || comment, "{} turns faults on: {line}", path.display());
        }
        assert!(!text.lines().any(|line| line.starts_with("default = ")), "{}", path.display());
    }
    let soak = std::fs::read_to_string(root().join("tests/soak/Cargo.toml")).unwrap();
    assert!(!soak.lines().any(|line| line.starts_with("default = ")), "soak has them by default");
}

/// Every named point is one that the campaigns know, so that none is silently never tried.
/// Goal: `make bench` is all of the benchmarks, as it says. Method: what the Makefile declares, but
/// for the GPU's, which run on other machines, and the public codes', whose sources are got
/// from outside.
#[test]
fn make_bench_leaves_no_benchmark_out() {
    let makefile = std::fs::read_to_string(root().join("Makefile")).unwrap().replace("\\\n", " ");
    let line = |begin: &str| makefile.lines().find_map(|line| line.strip_prefix(begin)).unwrap();
    let all: Vec<&str> = line("bench:").split_whitespace().collect();
    let declared = line(".PHONY:").split_whitespace().filter(|name| name.starts_with("bench-"));
    let left_out: Vec<&str> = declared.filter(|name| !all.contains(name)).collect();
    assert_eq!(left_out, ["bench-foreign", "bench-gpu"]);
}

#[test]
fn the_campaigns_know_every_named_point() {
    let mut known = String::new();
    for (name, text) in sources(&["tests/soak/src"], "rs") {
        if name.ends_with("kill.rs") {
            known = text;
        }
    }
    // The embedded coordinator's file alone is replaced; `soak kill` starts no embedded one.
    let elsewhere = ["durable.rename"];
    for (name, text) in sources(&["src", "dumper/src"], "rs") {
        for call in ["faults::point(\"", "faults::pass(\"", "faults::write_all(\""] {
            for rest in text.split(call).skip(1) {
                let point = rest.split('"').next().unwrap();
                let quoted = format!("\"{point}\"");
                let tried = known.contains(&quoted) || elsewhere.contains(&point);
                assert!(tried, "{name}: soak kill does not know {point}");
            }
        }
    }
}
