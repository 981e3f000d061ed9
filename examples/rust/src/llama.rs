//! A Llama in f32: RMSNorm, rotary positions (half-split), grouped-query attention through the cache, SwiGLU.

use std::path::Path;

use kvcache::Cache;

use crate::config::Config;
use crate::safetensors::Tensors;
use crate::Result;

/// One layer's weights; matrices are [out][in].
struct Layer {
    attention_norm: Vec<f32>, // [hidden]
    q: Vec<f32>,              // [num_heads * head_dim][hidden]
    k: Vec<f32>,              // [num_kv_heads * head_dim][hidden]
    v: Vec<f32>,              // [num_kv_heads * head_dim][hidden]
    out: Vec<f32>,            // [hidden][num_heads * head_dim]
    mlp_norm: Vec<f32>,       // [hidden]
    gate: Vec<f32>,           // [intermediate][hidden]
    up: Vec<f32>,             // [intermediate][hidden]
    down: Vec<f32>,           // [hidden][intermediate]
}

/// The weights; keys and values, and so the sequence, belong to the cache.
pub struct Llama {
    pub config: Config,
    embedding: Vec<f32>, // [vocab][hidden]
    layers: Vec<Layer>,
    norm: Vec<f32>,         // [hidden]
    head: Option<Vec<f32>>, // [vocab][hidden], where it is not the embedding
}

impl Llama {
    /// Reads `config.json` and `model.safetensors` of a folder.
    pub fn load(folder: &Path) -> Result<Self> {
        let config = Config::read(&folder.join("config.json"))?;
        let mut tensors = Tensors::read(&folder.join("model.safetensors"))?;
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let embedding = tensors.take("model.embed_tokens.weight", &[vocab, hidden])?;
        let layers = (0..config.num_layers).map(|i| take_layer(&mut tensors, &config, i)).collect::<Result<_>>()?;
        let norm = tensors.take("model.norm.weight", &[hidden])?;
        let head =
            if config.tie_word_embeddings { None } else { Some(tensors.take("lm_head.weight", &[vocab, hidden])?) };
        tensors.finish("lm_head.weight")?;
        Ok(Llama { config, embedding, layers, norm, head })
    }

    /// Appends one or more tokens to the cache's sequence; returns the logits of the token that follows.
    pub fn forward(&self, tokens: &[u8], cache: &mut Cache) -> Result<Vec<f32>, kvcache::Error> {
        let c = &self.config;
        let positions: Vec<i32> = (cache.next_position()..).take(tokens.len()).collect();
        let rotation = rotation(&positions, c.head_dim, c.rope_theta);
        let embedding = |token: &u8| &self.embedding[usize::from(*token) * c.hidden_size..][..c.hidden_size];
        let mut x: Vec<f32> = tokens.iter().flat_map(embedding).copied().collect(); // [n][hidden]
        let mut out = vec![0.0; tokens.len() * c.num_heads * c.head_dim];
        let mut batch = cache.begin(&positions)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let normed = rms_norm(&x, &layer.attention_norm, c.rms_norm_eps);
            let [mut q, mut k, v] =
                [&layer.q, &layer.k, &layer.v].map(|weight| product(&normed, weight, c.hidden_size));
            rotate(&mut q, c.num_heads, &rotation);
            rotate(&mut k, c.num_kv_heads, &rotation);
            batch.attend(index, &q, &k, &v, &mut out)?;
            add(&mut x, &product(&out, &layer.out, c.num_heads * c.head_dim));
            let normed = rms_norm(&x, &layer.mlp_norm, c.rms_norm_eps);
            let [mut gate, up] = [&layer.gate, &layer.up].map(|weight| product(&normed, weight, c.hidden_size));
            swiglu(&mut gate, &up);
            add(&mut x, &product(&gate, &layer.down, c.intermediate_size));
        }
        batch.commit()?;
        let last = rms_norm(&x[x.len() - c.hidden_size..], &self.norm, c.rms_norm_eps);
        Ok(product(&last, self.head.as_ref().unwrap_or(&self.embedding), c.hidden_size))
    }
}

fn take_layer(tensors: &mut Tensors, config: &Config, index: usize) -> Result<Layer> {
    let (hidden, inner) = (config.hidden_size, config.intermediate_size);
    let (q_rows, kv_rows) = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim);
    let mut take = |name: &str, shape: &[usize]| tensors.take(&format!("model.layers.{index}.{name}.weight"), shape);
    Ok(Layer {
        attention_norm: take("input_layernorm", &[hidden])?,
        q: take("self_attn.q_proj", &[q_rows, hidden])?,
        k: take("self_attn.k_proj", &[kv_rows, hidden])?,
        v: take("self_attn.v_proj", &[kv_rows, hidden])?,
        out: take("self_attn.o_proj", &[hidden, q_rows])?,
        mlp_norm: take("post_attention_layernorm", &[hidden])?,
        gate: take("mlp.gate_proj", &[inner, hidden])?,
        up: take("mlp.up_proj", &[inner, hidden])?,
        down: take("mlp.down_proj", &[hidden, inner])?,
    })
}

/// Multiplies x [n][len] by a matrix [m][len]; returns [n][m].
fn product(x: &[f32], matrix: &[f32], len: usize) -> Vec<f32> {
    let outputs = matrix.len() / len;
    let mut y = vec![0.0; x.len() / len * outputs];
    for (i, row) in matrix.chunks_exact(len).enumerate() {
        for (x, y) in x.chunks_exact(len).zip(y.chunks_exact_mut(outputs)) {
            y[i] = dot(x, row);
        }
    }
    y
}

/// A dot product in several sums, so that compilers can use vectors.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const SUMS: usize = 16;
    let (a_parts, b_parts) = (a.chunks_exact(SUMS), b.chunks_exact(SUMS));
    let rest: f32 = a_parts.remainder().iter().zip(b_parts.remainder()).map(|(a, b)| a * b).sum();
    let mut sums = [0.0; SUMS];
    for (a, b) in a_parts.zip(b_parts) {
        for i in 0..SUMS {
            sums[i] += a[i] * b[i];
        }
    }
    sums.iter().sum::<f32>() + rest
}

/// Each row of x, of the length of the weight, divided by its root mean square.
fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let mut y = Vec::with_capacity(x.len());
    for row in x.chunks_exact(weight.len()) {
        let scale = 1.0 / (dot(row, row) / row.len() as f32 + eps).sqrt();
        y.extend(row.iter().zip(weight).map(|(x, weight)| x * scale * weight));
    }
    y
}

/// Cosine and sine of each position's angles: [n][head_dim / 2]. In f64, as positions may be large.
fn rotation(positions: &[i32], head_dim: usize, theta: f64) -> Vec<Vec<(f32, f32)>> {
    let frequency = |i| theta.powf(-2.0 * i as f64 / head_dim as f64);
    let frequencies: Vec<f64> = (0..head_dim / 2).map(frequency).collect();
    let turn = |angle: f64| (angle.cos() as f32, angle.sin() as f32);
    let turns = |position: &i32| frequencies.iter().map(|frequency| turn(f64::from(*position) * frequency)).collect();
    positions.iter().map(turns).collect()
}

/// Rotates heads [n][num_heads][head_dim] in place (RoPE); element i pairs with i + head_dim / 2.
fn rotate(heads: &mut [f32], num_heads: usize, rotation: &[Vec<(f32, f32)>]) {
    let of_a_token = heads.len() / rotation.len();
    for (token, turns) in heads.chunks_exact_mut(of_a_token).zip(rotation) {
        for head in token.chunks_exact_mut(of_a_token / num_heads) {
            let (a, b) = head.split_at_mut(turns.len());
            for ((a, b), (cos, sin)) in a.iter_mut().zip(b).zip(turns) {
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
    }
}

/// silu(gate) * up, in place.
fn swiglu(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = *gate / (1.0 + (-*gate).exp()) * up;
    }
}

fn add(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}
