//! A cache for one sequence of a model whose layers are all alike: a small safe layer over the C library kvcache.
//!
//! ```
//! use kvcache::{ffi, Cache, Config};
//!
//! let (dtype, num_threads) = (ffi::KVC_F16, 0);
//! let config = Config { num_layers: 1, num_kv_heads: 2, head_dim: 4, max_seq_len: 16, dtype, num_threads };
//! let mut cache = Cache::new(&config)?;
//! let (q, k, v) = ([0.5; 3 * 8 * 4], [0.5; 3 * 2 * 4], [0.5; 3 * 2 * 4]); // three tokens with 8 query heads
//! let mut out = [0.0; 3 * 8 * 4];
//! let mut batch = cache.begin(&[0, 1, 2])?;
//! batch.attend(0, &q, &k, &v, &mut out)?;
//! batch.commit()?; // or drop it, and the tokens never were
//! assert_eq!(cache.next_position(), 3);
//! assert_eq!(out, [0.5; 3 * 8 * 4]);
//! # Ok::<(), kvcache::Error>(())
//! ```
//!
//! While a batch is open, it alone has the cache:
//!
//! ```compile_fail
//! fn misuse(cache: &mut kvcache::Cache) -> Result<(), kvcache::Error> {
//!     let batch = cache.begin(&[0])?;
//!     cache.begin(&[1])?; // without this line it compiles
//!     batch.commit()
//! }
//! ```
//!
//! ```
//! fn right(cache: &mut kvcache::Cache) -> Result<(), kvcache::Error> {
//!     let batch = cache.begin(&[0])?;
//!     batch.commit()
//! }
//! ```

pub mod ffi;

use std::ffi::CStr;
use std::fmt;
use std::mem::{self, size_of};
use std::ptr;

use ffi::*;

/// What a call of the library says when it fails; it has changed nothing.
#[derive(Debug)]
pub struct Error {
    pub status: kvc_status,
    sentence: String,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence)
    }
}

impl std::error::Error for Error {}

/// The sentence is taken at once: the thread's next failure replaces it.
fn check(status: kvc_status) -> Result<(), Error> {
    if status == KVC_OK {
        return Ok(());
    }
    // SAFETY: the string lives until this thread's next failure.
    let sentence = unsafe { CStr::from_ptr(kvc_last_error()) };
    Err(Error { status, sentence: sentence.to_string_lossy().into_owned() })
}

fn invalid(sentence: String) -> Error {
    Error { status: KVC_ERR_INVALID, sentence }
}

fn count(name: &str, n: usize) -> Result<i32, Error> {
    i32::try_from(n).map_err(|_| invalid(format!("{name} is {n}: it must be at most {}", i32::MAX)))
}

/// The shape of a cache; the library checks it.
pub struct Config {
    pub num_layers: usize,
    pub num_kv_heads: i32,
    pub head_dim: i32,
    /// The most tokens; 0: no limit.
    pub max_seq_len: i64,
    /// The type of stored rows, such as `KVC_F16`.
    pub dtype: i32,
    /// Threads of attention; 0: the library's default.
    pub num_threads: i32,
}

/// Keys and values of one sequence.
pub struct Cache {
    raw: *mut kvc_cache,
    num_kv_heads: usize,
    head_dim: usize,
}

// SAFETY: any thread may call any function of the library.
unsafe impl Send for Cache {}
unsafe impl Sync for Cache {}

impl Cache {
    pub fn new(config: &Config) -> Result<Self, Error> {
        let layer = kvc_layer {
            num_kv_heads: config.num_kv_heads,
            k_dim: config.head_dim,
            v_dim: config.head_dim,
            k_type: config.dtype,
            v_type: config.dtype,
            ..Default::default()
        };
        let num_layers = count("num_layers", config.num_layers)?;
        let layers = vec![layer; config.num_layers];
        let args = kvc_config {
            struct_size: size_of::<kvc_config>(),
            layers: layers.as_ptr(),
            layer_size: size_of::<kvc_layer>(),
            num_layers,
            max_seq_len: config.max_seq_len,
            max_sequences: 1,
            num_threads: config.num_threads,
            ..Default::default()
        };
        let mut raw = ptr::null_mut();
        // SAFETY: `args` points to live values, which the call copies.
        check(unsafe { kvc_cache_new(&args, &mut raw) })?;
        Ok(Cache { raw, num_kv_heads: config.num_kv_heads as usize, head_dim: config.head_dim as usize })
    }

    /// The position of the sequence's next token.
    pub fn next_position(&self) -> i32 {
        // SAFETY: `raw` lives as long as `self`, here and below.
        unsafe { kvc_next_position(self.raw, 0) }
    }

    /// Makes room for tokens at these positions, which a forward pass then fills.
    pub fn begin(&mut self, positions: &[i32]) -> Result<Batch<'_>, Error> {
        let num_tokens = count("the number of positions", positions.len())?;
        let mut raw = ptr::null_mut();
        // SAFETY: the slice has that many positions, which the call copies.
        check(unsafe { kvc_begin(self.raw, num_tokens, positions.as_ptr(), ptr::null(), ptr::null(), &mut raw) })?;
        Ok(Batch { raw, num_tokens: positions.len(), cache: self })
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        // SAFETY: a batch would borrow the cache. Where one was forgotten, this is KVC_ERR_BUSY, and nothing is freed.
        unsafe { kvc_cache_free(self.raw) };
    }
}

/// The tokens of one forward pass. Committing makes them part of the sequence; dropping aborts them.
pub struct Batch<'cache> {
    raw: *mut kvc_batch,
    num_tokens: usize,
    cache: &'cache mut Cache,
}

impl Batch<'_> {
    /// Stores one layer's keys and values, `[num_tokens][num_kv_heads][head_dim]`, then attends with its queries,
    /// `[num_tokens][num_heads][head_dim]`; `out` has the queries' shape.
    pub fn attend(&mut self, layer: usize, q: &[f32], k: &[f32], v: &[f32], out: &mut [f32]) -> Result<(), Error> {
        let (num_heads, num_kv_heads) = (self.heads("q", q)?, self.cache.num_kv_heads);
        for (name, rows, needed) in [("k", k, num_kv_heads), ("v", v, num_kv_heads), ("out", &*out, num_heads)] {
            let heads = self.heads(name, rows)?;
            if heads != needed {
                return Err(invalid(format!("{name} has {heads} heads, where {needed} are needed")));
            }
        }
        let put = kvc_put_args {
            struct_size: size_of::<kvc_put_args>(),
            k: k.as_ptr().cast(),
            v: v.as_ptr().cast(),
            ..Default::default()
        };
        let args = kvc_attend_args {
            struct_size: size_of::<kvc_attend_args>(),
            q: q.as_ptr().cast(),
            out: out.as_mut_ptr().cast(),
            put: &put,
            ..Default::default()
        };
        let plan = kvc_plan_args {
            struct_size: size_of::<kvc_plan_args>(),
            layer: count("layer", layer)?,
            num_heads: count("num_heads", num_heads)?,
            ..Default::default()
        };
        // SAFETY: f32 rows, as many as the shapes above say; they are not needed after the call.
        check(unsafe { kvc_attend(self.raw, &plan, &args) })
    }

    /// The number of heads in these rows of the batch's tokens.
    fn heads(&self, name: &str, rows: &[f32]) -> Result<usize, Error> {
        let of_one_head = self.num_tokens * self.cache.head_dim;
        if rows.is_empty() || rows.len() % of_one_head != 0 {
            let (tokens, dim) = (self.num_tokens, self.cache.head_dim);
            return Err(invalid(format!("{name} has {} elements: it must be [{tokens}][heads][{dim}]", rows.len())));
        }
        Ok(rows.len() / of_one_head)
    }

    /// Makes the tokens part of the sequence; after an error the sequence is as it was.
    pub fn commit(self) -> Result<(), Error> {
        // SAFETY: the batch is open; a commit that succeeds consumes its handle, so that nothing is left to drop.
        check(unsafe { kvc_commit(self.raw) })?;
        mem::forget(self);
        Ok(())
    }
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        // SAFETY: the batch is open, since `commit` forgets committed ones.
        unsafe { kvc_abort(self.raw) };
    }
}
