//! Tests the safe layer against the library.

use kvcache::{ffi, Batch, Cache, Config, Error};

const NUM_LAYERS: usize = 2;
const NUM_HEADS: usize = 4;
const NUM_KV_HEADS: usize = 2;
const DIM: usize = 8;

fn config() -> Config {
    let (num_kv_heads, head_dim) = (NUM_KV_HEADS as i32, DIM as i32);
    Config { num_layers: NUM_LAYERS, num_kv_heads, head_dim, max_seq_len: 8, dtype: ffi::KVC_F32, num_threads: 1 }
}

fn cache() -> Cache {
    Cache::new(&config()).unwrap()
}

/// Numbers between -1 and 1 with a long period.
fn numbers(seed: usize, n: usize) -> Vec<f32> {
    (0..n).map(|i| ((seed * 7919 + i * 104_729) % 2003) as f32 / 1001.0 - 1.0).collect()
}

/// Rows of some tokens with `num_heads` heads, different in each layer.
fn rows(seed: usize, tokens: usize, heads: usize, layer: usize) -> Vec<f32> {
    numbers(seed * NUM_LAYERS + layer, tokens * heads * DIM)
}

/// Runs one forward pass; returns each layer's attention.
fn pass(cache: &mut Cache, seed: usize, tokens: usize) -> Result<Vec<Vec<f32>>, Error> {
    let positions: Vec<i32> = (cache.next_position()..).take(tokens).collect();
    let mut batch = cache.begin(&positions)?;
    let outs = (0..NUM_LAYERS).map(|layer| attend(&mut batch, seed, tokens, layer)).collect::<Result<_, _>>()?;
    batch.commit()?;
    Ok(outs)
}

fn attend(batch: &mut Batch, seed: usize, tokens: usize, layer: usize) -> Result<Vec<f32>, Error> {
    let [q, k, v] = [(seed, NUM_HEADS), (seed + 100, NUM_KV_HEADS), (seed + 200, NUM_KV_HEADS)]
        .map(|(seed, heads)| rows(seed, tokens, heads, layer));
    let mut out = vec![f32::NAN; q.len()];
    batch.attend(layer, &q, &k, &v, &mut out)?;
    Ok(out)
}

/// Softmax attention in f64 over the first `seen` rows, for one head of one token.
fn expected(q: &[f32], k: &[f32], v: &[f32], seen: usize, kv_head: usize) -> Vec<f64> {
    let row = |rows: &[f32], i: usize| -> Vec<f64> {
        rows[(i * NUM_KV_HEADS + kv_head) * DIM..][..DIM].iter().map(|x| f64::from(*x)).collect()
    };
    let score = |i| row(k, i).iter().zip(q).map(|(k, q)| k * f64::from(*q)).sum::<f64>() / (DIM as f64).sqrt();
    let weights: Vec<f64> = (0..seen).map(|i| score(i).exp()).collect();
    let total: f64 = weights.iter().sum();
    (0..DIM).map(|d| (0..seen).map(|i| weights[i] * row(v, i)[d]).sum::<f64>() / total).collect()
}

#[test]
fn attention_is_that_of_every_row_before() {
    let mut cache = cache();
    let (prompt, step) = (pass(&mut cache, 1, 3).unwrap(), pass(&mut cache, 2, 1).unwrap());
    assert_eq!(cache.next_position(), 4);
    for layer in 0..NUM_LAYERS {
        let all =
            |offset: usize, heads| [rows(1 + offset, 3, heads, layer), rows(2 + offset, 1, heads, layer)].concat();
        let (q, k, v) = (all(0, NUM_HEADS), all(100, NUM_KV_HEADS), all(200, NUM_KV_HEADS));
        let out = [&prompt[layer][..], &step[layer][..]].concat();
        for (i, (q, out)) in q.chunks(DIM).zip(out.chunks(DIM)).enumerate() {
            let (token, head) = (i / NUM_HEADS, i % NUM_HEADS);
            for (x, y) in expected(q, &k, &v, token + 1, head / (NUM_HEADS / NUM_KV_HEADS)).iter().zip(out) {
                assert!((x - f64::from(*y)).abs() < 1e-6, "layer {layer}, token {token}, head {head}: {y}, not {x}");
            }
        }
    }
}

#[test]
fn a_batch_that_is_dropped_never_was() {
    let (mut cache, mut other) = (cache(), cache());
    pass(&mut cache, 1, 3).unwrap();
    let mut batch = cache.begin(&[3, 4]).unwrap();
    attend(&mut batch, 9, 2, 0).unwrap();
    drop(batch);
    assert_eq!(cache.next_position(), 3);
    pass(&mut other, 1, 3).unwrap();
    assert_eq!(pass(&mut cache, 2, 1).unwrap(), pass(&mut other, 2, 1).unwrap());
}

#[test]
fn a_commit_that_fails_aborts() {
    let mut cache = cache();
    let mut batch = cache.begin(&[0]).unwrap();
    attend(&mut batch, 1, 1, 0).unwrap(); // and not in layer 1
    let error = batch.commit().unwrap_err();
    assert_eq!(error.status, ffi::KVC_ERR_INVALID);
    assert!(error.to_string().contains("layer 1"), "{error}");
    assert_eq!(cache.next_position(), 0);
    pass(&mut cache, 1, 1).unwrap();
}

#[test]
fn errors_bring_their_sentence() {
    let mut cache = cache();
    pass(&mut cache, 1, 8).unwrap();
    let error = pass(&mut cache, 2, 1).unwrap_err();
    assert_eq!(error.status, ffi::KVC_ERR_FULL);
    assert!(error.to_string().starts_with("1 more token does not fit"), "{error}");
    assert_eq!(cache.next_position(), 8);
    for positions in [&[][..], &[-1]] {
        assert_eq!(cache.begin(positions).err().unwrap().status, ffi::KVC_ERR_INVALID);
    }
}

#[test]
fn configurations_are_checked() {
    for (config, field) in [
        (Config { num_layers: 0, ..config() }, "num_layers"),
        (Config { num_layers: usize::MAX, ..config() }, "num_layers"),
        (Config { num_kv_heads: -1, ..config() }, "num_kv_heads"),
        (Config { head_dim: 0, ..config() }, "k_dim"),
        (Config { dtype: ffi::KVC_Q8_0, ..config() }, "k_dim"),
        (Config { dtype: 99, ..config() }, "k_type"),
        (Config { max_seq_len: -1, ..config() }, "max_seq_len"),
        (Config { num_threads: -1, ..config() }, "num_threads"),
    ] {
        let error = Cache::new(&config).err().expect(field);
        assert!(error.to_string().contains(field), "{error}");
    }
}

#[test]
fn arrays_of_other_shapes_are_refused() {
    let mut cache = cache();
    let mut batch = cache.begin(&[0, 1]).unwrap();
    let kv = vec![0.0; 2 * NUM_KV_HEADS * DIM];
    let mut attend = |layer, q: usize, k: usize, v: usize, out: usize| {
        let (k, v) = (&vec![0.0; k][..], &vec![0.0; v][..]);
        batch.attend(layer, &vec![0.0; q], k, v, &mut vec![0.0; out]).unwrap_err().to_string()
    };
    let n = kv.len();
    assert_eq!(attend(0, 0, n, n, 0), "q has 0 elements: it must be [2][heads][8]");
    assert_eq!(attend(0, 2 * n + 1, n, n, 2 * n), "q has 65 elements: it must be [2][heads][8]");
    assert_eq!(attend(0, 2 * n, n - 1, n, 2 * n), "k has 31 elements: it must be [2][heads][8]");
    assert_eq!(attend(0, 2 * n, n, n / 2, 2 * n), "v has 1 heads, where 2 are needed");
    assert_eq!(attend(0, 2 * n, n, n, n), "out has 2 heads, where 4 are needed");
    assert!(attend(0, n / 2 * 3, n, n, n / 2 * 3).contains("num_heads is 3"));
    assert!(attend(NUM_LAYERS, 2 * n, n, n, 2 * n).contains("layer"));
    assert!(attend(usize::MAX, 2 * n, n, n, 2 * n).contains("layer"));
}

#[test]
fn a_cache_may_go_to_another_thread() {
    let mut cache = cache();
    pass(&mut cache, 1, 3).unwrap();
    let (cache, error) = std::thread::spawn(move || {
        pass(&mut cache, 2, 5).unwrap();
        let error = pass(&mut cache, 3, 1).unwrap_err();
        (cache, error)
    })
    .join()
    .unwrap();
    assert!(error.to_string().starts_with("1 more token does not fit"), "{error}");
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| assert_eq!(cache.next_position(), 8));
        }
    });
}

#[test]
fn a_batch_that_is_forgotten_keeps_its_cache() {
    let mut cache = cache();
    std::mem::forget(cache.begin(&[0]).unwrap());
    let error = cache.begin(&[0]).err().unwrap();
    assert!(error.to_string().contains("batch"), "{error}");
}
