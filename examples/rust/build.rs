//! Compiles the core with `$CC`, or `cc`, and links it as a shared library.
//! Where `$KVCACHE_LIB_DIR` names the folder of an installed libkvcache, links that instead.

use std::env;
use std::env::consts::{DLL_PREFIX, DLL_SUFFIX};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

fn main() {
    for name in ["CC", "KVCACHE_LIB_DIR"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    let cc = env::var("CC").unwrap_or_else(|_| "cc".into());
    println!("cargo:rustc-env=KVCACHE_CC={cc}"); // for the tests
    let folder = env::var("KVCACHE_LIB_DIR").unwrap_or_else(|_| {
        let folder = env::var("OUT_DIR").expect("cargo sets OUT_DIR");
        compile_core(&cc, Path::new(&folder));
        folder
    });
    println!("cargo:rustc-link-search=native={folder}");
    println!("cargo:rustc-link-lib=dylib=kvcache");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{folder}");
}

fn compile_core(cc: &str, folder: &Path) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let [include, internal] = ["include", "src"].map(|name| {
        println!("cargo:rerun-if-changed={}", root.join(name).display());
        format!("-I{}", root.join(name).display())
    });
    let flags = ["-std=c11", "-O2", "-fPIC", "-fvisibility=hidden", &include, &internal, "-c"];

    let sources = entries(&root.join("src")).iter().flat_map(|layer| c_files(layer)).collect::<Vec<_>>();
    let jobs = env::var("NUM_JOBS").map_or(1, |jobs| jobs.parse().expect("cargo sets NUM_JOBS to a number"));
    let mut compilers = Vec::new();
    for job in 0..jobs.min(sources.len()) {
        let part: Vec<_> = sources.iter().skip(job).step_by(jobs).cloned().collect();
        compilers.push(start(cc, &flags, &part, folder));
    }
    compilers.into_iter().for_each(finish);

    let objects: Vec<_> = sources.iter().map(|file| file.with_extension("o").file_name().unwrap().into()).collect();
    let library = format!("{DLL_PREFIX}kvcache{DLL_SUFFIX}");
    finish(start(cc, &["-shared", "-o", &library, "-lm", "-lpthread"], &objects, folder));
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    entries.map(|entry| entry.expect("an entry of a folder").path()).collect()
}

fn c_files(folder: &Path) -> Vec<PathBuf> {
    let is_c = |file: &PathBuf| file.extension().map_or(false, |extension| extension == "c");
    entries(folder).into_iter().filter(is_c).collect()
}

/// Starts `$CC`, which may be several words, in the folder for its output.
fn start(cc: &str, arguments: &[&str], files: &[PathBuf], folder: &Path) -> Child {
    let mut words = cc.split_whitespace();
    let mut command = Command::new(words.next().unwrap_or_default());
    let started = command.args(words).args(files).args(arguments).current_dir(folder).spawn();
    started.unwrap_or_else(|error| panic!("CC is {cc:?}, which cannot be run ({error}): set it to a C compiler"))
}

fn finish(mut compiler: Child) {
    assert!(compiler.wait().expect("a compiler to wait for").success(), "the C compiler failed");
}
