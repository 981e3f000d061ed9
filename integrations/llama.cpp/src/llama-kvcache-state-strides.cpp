// Saved state of models with layers that have a row for a block of tokens, in a format of its own: llama.cpp's own
// cache holds other rows.  All integers are of 32 bits.
//
//   KVCS, or KVCP if it is partial; the number of layers; of each: its stride and its window, or 0; the type and the
//   bytes of its keys, and of its values
//   the number of sequences; of each, by rising number: its number and its tokens, which begin at position 0
//     the rows of its parts, layer by layer, keys before values: all rows of layers that see everything, or have a row
//     for a block; then, for each kind of window, the rows that the next token sees
//
// A partial state has no rows of the first part.  Sequences that share tokens are saved apart.
#include "llama-kvcache-state.h"

#include "llama-impl.h"
#include "llama-io.h"

#include <algorithm>

static uint32_t magic_of(llama_state_seq_flags flags) {
    return flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY ? 0x5043564b : 0x5343564b; // KVCP, KVCS
}

static int32_t stride_of(const kvc_layer &layer) { return std::max(1, layer.policy.stride); }
static int32_t window_of(const kvc_layer &layer) { return layer.policy.kind == KVC_SLIDING ? layer.policy.window : 0; }

// layers that are restored together, and how many of the last positions they have
struct llama_kvcache::strided_part {
    int32_t window; // 0: all
    std::vector<int32_t> layers;

    llama_pos first(llama_pos n_tokens) const { return window ? std::max(0, n_tokens - window) : 0; }
};

std::vector<llama_kvcache::strided_part> llama_kvcache::strided_parts(llama_state_seq_flags flags) const {
    std::vector<strided_part> res(1);

    for (int32_t layer = 0; layer < (int32_t)layers.cache.size(); ++layer) {
        const int32_t window = window_of(layers.cache[layer]);
        auto part = std::find_if(res.begin(), res.end(), [&](const strided_part &p) { return p.window == window; });

        if (part == res.end()) {
            part = res.insert(part, {window, {}});
        }
        part->layers.push_back(layer);
    }
    if (flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) {
        res.erase(res.begin());
    }

    return res;
}

namespace {

// a row of keys, or of values: all heads of a token or block
struct row_size {
    row_size(const kvc_layer &layer, bool is_value)
        : type(is_value ? layer.v_type : layer.k_type),
          n_head_bytes(is_value && (layer.value_in_key || layer.v_dim == 0)
                           ? 0
                           : kvc_row_bytes(type, is_value ? layer.v_dim : layer.k_dim)),
          n_bytes(n_head_bytes * layer.num_kv_heads) {}

    int32_t type;
    size_t n_head_bytes;
    size_t n_bytes;
};

template <typename T> void write(llama_io_write_i &io, T value) { io.write(&value, sizeof(value)); }

uint32_t read(llama_io_read_i &io) {
    uint32_t res;

    io.read(&res, sizeof(res));

    return res;
}

// calls visit(begin, end, n_rows) for pieces of the positions [begin, end) whose rows fit a buffer
template <typename F> void in_pieces(const kvc_layer &layer, size_t n_bytes, llama_pos begin, llama_pos end, F visit) {
    const llama_pos stride = stride_of(layer);
    const llama_pos n_most = std::max<llama_pos>(1, (llama_pos)(N_BUFFER / n_bytes)) * stride;

    for (llama_pos next; begin < end; begin = next) {
        next = std::min(end, begin / stride * stride + n_most);
        visit(begin, next, next / stride - begin / stride);
    }
}

} // namespace

void llama_kvcache::write_layout(llama_io_write_i &io, llama_state_seq_flags flags) const {
    write(io, magic_of(flags));
    write(io, (uint32_t)layers.cache.size());
    for (const auto &layer : layers.cache) {
        write(io, stride_of(layer));
        write(io, window_of(layer));
        for (const bool is_value : {false, true}) {
            const row_size row(layer, is_value);

            write(io, (uint32_t)llama_kvcache_state_type(row.type));
            write(io, (uint32_t)row.n_bytes);
        }
    }
}

void llama_kvcache::read_layout(llama_io_read_i &io, llama_state_seq_flags flags) const {
    const auto expect = [&](uint32_t expected, const char *what, size_t layer) {
        if (const uint32_t found = read(io); found != expected) {
            throw llama_kvcache_state_failure(
                format("mismatched %s (%u instead of %u, layer %zu)", what, found, expected, layer));
        }
    };

    expect(magic_of(flags), "format", 0);
    expect((uint32_t)layers.cache.size(), "number of layers", 0);
    for (size_t i = 0; i < layers.cache.size(); ++i) {
        expect(stride_of(layers.cache[i]), "stride", i);
        expect(window_of(layers.cache[i]), "window", i);
        for (const bool is_value : {false, true}) {
            const row_size row(layers.cache[i], is_value);

            if (const uint32_t found = read(io); found != (uint32_t)llama_kvcache_state_type(row.type)) {
                throw llama_kvcache_state_failure(format("mismatched type (%s instead of %s, layer %zu)",
                                                         llama_kvcache_state_type_name(found).c_str(),
                                                         kvc_type_name(row.type), i));
            }
            expect((uint32_t)row.n_bytes, "row size", i);
        }
    }
}

void llama_kvcache::write_part(llama_io_write_i &io, const strided_part &part, int64_t id, llama_pos n_tokens) const {
    std::vector<uint8_t> rows;

    for (const int32_t layer : part.layers) {
        for (const bool is_value : {false, true}) {
            const row_size row(layers.cache[layer], is_value);

            if (row.n_bytes == 0) {
                continue;
            }

            kvc_rows_out out = {};

            out.struct_size = sizeof(out);
            out.raw = 1;
            out.k_head_stride = out.v_head_stride = row.n_head_bytes;
            out.k_row_stride = out.v_row_stride = row.n_bytes;

            in_pieces(layers.cache[layer], row.n_bytes, part.first(n_tokens), n_tokens,
                      [&](llama_pos begin, llama_pos end, llama_pos n_rows) {
                          rows.resize(n_rows * row.n_bytes);
                          (is_value ? out.v : out.k) = rows.data();
                          llama_kvcache_check(kvc_extract(cache, id, layer, begin, end, &out));
                          io.write(rows.data(), rows.size());
                      });
        }
    }
}

// Keys and values are put together.
void llama_kvcache::read_layer(llama_io_read_i &io, kvc_batch *to, int32_t layer, llama_pos first, llama_pos n_tokens) {
    const row_size k(layers.cache[layer], false);
    const row_size v(layers.cache[layer], true);
    const llama_pos stride = stride_of(layers.cache[layer]);
    const size_t n_rows = n_tokens / stride - first / stride;

    std::vector<uint8_t> keys(n_rows * k.n_bytes);
    std::vector<uint8_t> values(n_rows * v.n_bytes);

    io.read(keys.data(), keys.size());
    io.read(values.data(), values.size());

    kvc_put_args args = {};

    args.struct_size = sizeof(args);
    args.k = keys.data();
    args.k_type = k.type;
    args.k_token_stride = k.n_bytes;
    args.k_head_stride = k.n_head_bytes;
    if (v.n_bytes > 0) {
        args.v = values.data();
        args.v_type = v.type;
        args.v_token_stride = v.n_bytes;
        args.v_head_stride = v.n_head_bytes;
    }
    llama_kvcache_check(kvc_put(to, layer, &args));
}

void llama_kvcache::read_part(llama_io_read_i &io, const strided_part &part, int64_t id, llama_pos n_tokens) {
    const llama_pos first = part.first(n_tokens);

    std::vector<int32_t> positions;
    for (llama_pos pos = first; pos < n_tokens; ++pos) {
        positions.push_back(pos);
    }

    const std::vector<int64_t> seq_ids(positions.size(), id);
    std::vector<uint8_t> replaced(layers.cache.size(), 0);

    for (const int32_t layer : part.layers) {
        replaced[layer] = 1;
    }

    batch_ptr to = begin_restored(positions, seq_ids, replaced);

    for (const int32_t layer : part.layers) {
        read_layer(io, to.get(), layer, first, n_tokens);
    }

    llama_kvcache_check(kvc_commit(to.get()));
    to.release();
}

void llama_kvcache::write_strided(llama_io_write_i &io, llama_seq_id seq_id, llama_state_seq_flags flags) const {
    std::vector<llama_seq_id> seqs;

    for (llama_seq_id s = 0; s < LLAMA_MAX_SEQ; ++s) {
        if (seq_id == -1 ? seq_pos_max(s) >= 0 : s == seq_id) {
            seqs.push_back(s);
        }
    }

    write_layout(io, flags);
    write(io, (uint32_t)seqs.size());
    for (const llama_seq_id s : seqs) {
        const llama_pos n_tokens = seq_pos_max(s) + 1;

        write(io, (uint32_t)s);
        write(io, (uint32_t)n_tokens);
        for (const auto &part : strided_parts(flags)) {
            write_part(io, part, id_of(s), n_tokens);
        }
    }
}

void llama_kvcache::read_strided(llama_io_read_i &io, llama_seq_id seq_id, llama_state_seq_flags flags) {
    read_layout(io, flags);

    const uint32_t n_seqs = read(io);

    if (seq_id != -1 && n_seqs != 1) {
        throw llama_kvcache_state_failure(format("the state has %u sequences", n_seqs));
    }

    uint32_t least = 0; // that the next sequence's number can be

    for (uint32_t i = 0; i < n_seqs; ++i) {
        const uint32_t saved = read(io);
        const uint32_t n_tokens = read(io);
        const llama_seq_id to = seq_id == -1 ? (llama_seq_id)saved : seq_id;

        if (seq_id == -1 && (saved < least || saved >= cparams.n_seq_max)) {
            throw llama_kvcache_state_failure(
                format("invalid seq_id, %u is out of range [%u, %u)", saved, least, cparams.n_seq_max));
        }
        if (n_tokens > cparams.n_ctx_seq) {
            throw llama_kvcache_state_failure(
                format("sequence %u has %u tokens (of %u)", saved, n_tokens, cparams.n_ctx_seq));
        }
        if ((flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) && (llama_pos)n_tokens > kvc_next_position(cache, id_of(to))) {
            throw llama_kvcache_state_failure(
                format("sequence %d has less than the %u tokens of the state", to, n_tokens));
        }
        for (const auto &part : strided_parts(flags)) {
            if (n_tokens > 0) {
                read_part(io, part, id_of(to), (llama_pos)n_tokens);
            }
        }
        least = saved + 1;
    }
}
