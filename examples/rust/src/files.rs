//! Opens untrusted files: regular ones only, so that no pipe or device is waited for.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::Result;

#[cfg(target_os = "linux")]
const O_NONBLOCK: i32 = 0o4000;
#[cfg(not(target_os = "linux"))]
const O_NONBLOCK: i32 = 4;

/// Opens a regular file; returns it with its size in bytes.
pub fn open(path: &Path) -> Result<(File, u64)> {
    let error = |error| format!("{}: {error}", path.display());
    let file = OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open(path).map_err(error)?;
    let found = file.metadata().map_err(error)?;
    if found.is_file() {
        Ok((file, found.len()))
    } else {
        Err(format!("{} is not a file", path.display()).into())
    }
}

/// Reads a text file of at most `most` bytes.
pub fn read_text(path: &Path, most: u64) -> Result<String> {
    let (file, size) = open(path)?;
    if size > most {
        return Err(format!("{} is larger than the {most} bytes that it may have", path.display()).into());
    }
    let mut text = String::new();
    file.take(most).read_to_string(&mut text).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(text)
}
