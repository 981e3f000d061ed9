//! Compiles the core with `$CC`, or `cc`, and links it as a shared library.
//! Where `$KVCACHE_LIB_DIR` names the folder of an installed libkvcache, links that instead.

use std::env;
use std::env::consts::{DLL_PREFIX, DLL_SUFFIX};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

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
    let library = format!("{DLL_PREFIX}kvcache{DLL_SUFFIX}");
    let flags = ["-std=c11", "-O2", "-fPIC", "-fvisibility=hidden", "-shared", &include, &internal, "-o", &library];
    let sources = entries(&root.join("src")).into_iter().flat_map(|layer| entries(&layer));
    let sources = sources.filter(|file| file.extension().map_or(false, |extension| extension == "c"));

    let mut words = cc.split_whitespace(); // such as "ccache gcc"
    let mut command = Command::new(words.next().unwrap_or_default());
    command.args(words).args(flags).args(sources).args(["-lm", "-lpthread"]).current_dir(folder);
    let ended = command.status();
    let ended =
        ended.unwrap_or_else(|error| panic!("CC is {cc:?}, which cannot be run ({error}): set it to a C compiler"));
    assert!(ended.success(), "the C compiler failed");
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    entries.map(|entry| entry.expect("an entry of a folder").path()).collect()
}
