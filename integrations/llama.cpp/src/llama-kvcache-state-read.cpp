#include "llama-kvcache-state.h"

#include "llama-impl.h"
#include "llama-io.h"
#include "llama-model.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>

static std::runtime_error failure(const std::string &reason) {
    LLAMA_LOG_ERROR("llama_kvcache::state_read: %s\n", reason.c_str());

    return std::runtime_error("failed to restore the kv cache: " + reason);
}

class llama_kvcache::state_reader {
  public:
    // dest -1: of all sequences
    state_reader(llama_kvcache &mem, llama_io_read_i &io, llama_seq_id dest);

    void read(const state_part &part);

    // gives the sequences what they share
    void share();

  private:
    struct cell {
        llama_pos pos;
        int32_t source;
    };

    // Cells of the same sequences in both parts: a sequence of the cache holds their rows until share.
    struct source {
        std::vector<llama_seq_id> seq_ids;
        int32_t whole; // the source with these cells in the part without windows, where more sequences have them; or -1
    };

    struct range {
        llama_pos begin;
        llama_pos end;
        int32_t source;
    };

    // where the rows of a cell go
    struct place {
        uint8_t *data;
        int64_t head_stride;
    };

    template <typename T> T read() {
        T res;
        io.read(&res, sizeof(res));
        return res;
    }

    template <typename T> void expect(T value, const char *what, const char *of, int32_t layer);

    void read_stream(const state_part &part, uint32_t stream, uint32_t n_cells);
    void read_cells(const state_part &part, uint32_t stream, uint32_t n_cells);
    int32_t read_source(const state_part &part, uint32_t stream, llama_pos pos);
    int32_t source_of(std::vector<llama_seq_id> seq_ids, int32_t whole);
    int32_t find_whole(llama_seq_id seq_id, llama_pos pos) const;
    void sort_cells(const state_part &part);
    std::vector<range> ranges_of(llama_seq_id seq_id) const;

    void begin(const state_part &part);
    std::vector<place> places_of(int32_t layer, bool is_value) const;
    void read_rows(int32_t layer, bool is_value);
    void read_transposed(int32_t layer);

    int64_t id_of(int32_t source) const;

    llama_kvcache &mem;
    llama_io_read_i &io;
    const llama_seq_id dest;
    const uint32_t n_stream;

    const bool is_shared; // cells belong to several sequences

    std::vector<cell> cells;     // of the stream
    std::vector<int32_t> tokens; // [cell] of the batch

    std::vector<source> sources;
    std::map<std::pair<int32_t, std::vector<llama_seq_id>>, int32_t> source_index; // [whole, sequences]
    std::vector<std::vector<range>> ranges[2];                                     // [has windows][sequence] ascending

    std::unique_ptr<kvc_batch, void (*)(kvc_batch *)> batch;
};

llama_kvcache::state_reader::state_reader(llama_kvcache &mem, llama_io_read_i &io, llama_seq_id dest)
    : mem(mem), io(io), dest(dest), n_stream(mem.n_stream()), is_shared(dest == -1 && n_stream == 1),
      batch(nullptr, kvc_abort) {
    for (auto &r : ranges) {
        r.resize(mem.cparams.n_seq_max);
    }
}

template <typename T>
void llama_kvcache::state_reader::expect(T value, const char *what, const char *of, int32_t layer) {
    const T found = read<T>();

    if (found != value) {
        throw failure(format("mismatched %s of %s (%lld instead of %lld, layer %d)", what, of, (long long)found,
                             (long long)value, mem.layers.model[layer].il));
    }
}

int64_t llama_kvcache::state_reader::id_of(int32_t source) const {
    return is_shared ? LLAMA_MAX_SEQ + (int64_t)source : source;
}

int32_t llama_kvcache::state_reader::source_of(std::vector<llama_seq_id> seq_ids, int32_t whole) {
    const auto res = source_index.emplace(std::make_pair(whole, seq_ids), (int32_t)sources.size());

    if (res.second) {
        sources.push_back({std::move(seq_ids), whole});
    }

    return res.first->second;
}

// returns the source that gives a sequence its row at a position in the layers without windows, -1 if there is none
int32_t llama_kvcache::state_reader::find_whole(llama_seq_id seq_id, llama_pos pos) const {
    const auto &r = ranges[0][seq_id];

    const auto next =
        std::upper_bound(r.begin(), r.end(), pos, [](llama_pos p, const range &other) { return p < other.begin; });

    return next == r.begin() || pos >= (next - 1)->end ? -1 : (next - 1)->source;
}

int32_t llama_kvcache::state_reader::read_source(const state_part &part, uint32_t stream, llama_pos pos) {
    const uint32_t n = read<uint32_t>();

    if (n == 0 || n > (dest == -1 ? mem.cparams.n_seq_max : 1)) {
        throw failure(format("invalid number of sequences of a cell (%u, of %u)", n, mem.cparams.n_seq_max));
    }

    std::vector<llama_seq_id> seq_ids(n);
    for (auto &id : seq_ids) {
        id = read<llama_seq_id>();

        if (dest == -1 && (id < 0 || (uint32_t)id >= mem.cparams.n_seq_max)) {
            throw failure(format("invalid seq_id, %d is out of range [0, %u)", id, mem.cparams.n_seq_max));
        }
        if (dest == -1 && n_stream > 1 && (uint32_t)id != stream) {
            throw failure(format("invalid seq_id, %d is in stream %u", id, stream));
        }
    }

    if (!is_shared) {
        return dest == -1 ? (int32_t)stream : dest;
    }

    std::sort(seq_ids.begin(), seq_ids.end());
    seq_ids.erase(std::unique(seq_ids.begin(), seq_ids.end()), seq_ids.end());

    const int32_t whole = part.has_windows ? find_whole(seq_ids[0], pos) : -1;
    if (whole >= 0 && sources[whole].seq_ids == seq_ids) {
        return whole;
    }

    return source_of(std::move(seq_ids), whole);
}

// sorts the cells by where their rows go, so that a sequence is restored in order of position
void llama_kvcache::state_reader::sort_cells(const state_part &part) {
    std::vector<int32_t> order(cells.size());
    for (size_t i = 0; i < order.size(); ++i) {
        order[i] = (int32_t)i;
    }

    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
        return std::make_pair(cells[a].source, cells[a].pos) < std::make_pair(cells[b].source, cells[b].pos);
    });

    tokens.resize(order.size());

    std::vector<range> sorted;
    for (size_t t = 0; t < order.size(); ++t) {
        const auto &c = cells[order[t]];

        tokens[order[t]] = (int32_t)t;

        if (!sorted.empty() && sorted.back().source == c.source && sorted.back().end == c.pos) {
            ++sorted.back().end;
        } else {
            sorted.push_back({c.pos, c.pos + 1, c.source});
        }
    }

    if (!is_shared) {
        return;
    }

    auto &by_seq = ranges[part.has_windows];
    for (const auto &r : sorted) {
        for (const llama_seq_id id : sources[r.source].seq_ids) {
            by_seq[id].push_back(r);
        }
        if (sources[r.source].whole >= 0) {
            llama_kvcache_check(kvc_share(mem.cache, id_of(sources[r.source].whole), id_of(r.source), r.begin, r.end));
        }
    }
    for (auto &r : by_seq) {
        std::sort(r.begin(), r.end(), [](const range &a, const range &b) { return a.begin < b.begin; });
    }
}

void llama_kvcache::state_reader::read_cells(const state_part &part, uint32_t stream, uint32_t n_cells) {
    if (n_cells > mem.cparams.n_ctx_seq) {
        throw failure(format("not enough cells (%u of %u)", n_cells, mem.cparams.n_ctx_seq));
    }

    cells.clear();
    for (uint32_t i = 0; i < n_cells; ++i) {
        const llama_pos pos = read<llama_pos>();

        if (pos < 0 || pos == INT32_MAX) {
            throw failure(format("invalid position, %d is out of range [0, %d)", pos, INT32_MAX));
        }

        cells.push_back({pos, read_source(part, stream, pos)});
    }

    sort_cells(part);
}

void llama_kvcache::state_reader::begin(const state_part &part) {
    std::vector<int32_t> positions(cells.size());
    std::vector<int64_t> seq_ids(cells.size());

    for (size_t i = 0; i < cells.size(); ++i) {
        positions[tokens[i]] = cells[i].pos;
        seq_ids[tokens[i]] = id_of(cells[i].source);
    }

    kvc_begin_args args = {};

    args.struct_size = sizeof(args);
    args.num_tokens = (int32_t)cells.size();
    args.positions = positions.data();
    args.seq_ids = seq_ids.data();
    args.restored = part.restored.data();

    kvc_batch *res = nullptr;

    if (kvc_begin_with(mem.cache, &args, &res)) {
        throw failure(format("%zu cells do not fit: %s", cells.size(), kvc_last_error()));
    }

    batch.reset(res);
}

std::vector<llama_kvcache::state_reader::place> llama_kvcache::state_reader::places_of(int32_t layer,
                                                                                       bool is_value) const {
    std::vector<place> of_token;

    while (of_token.size() < cells.size()) {
        kvc_span span;

        llama_kvcache_check(kvc_slots(batch.get(), layer, (int32_t)of_token.size(), &span, sizeof(span), nullptr));

        auto *data = (uint8_t *)const_cast<void *>(is_value ? span.v : span.k); // slots are for writing
        const int64_t head_stride = is_value ? span.v_head_stride : span.k_head_stride;
        const int64_t row_stride = is_value ? span.v_row_stride : span.k_row_stride;

        for (int32_t i = 0; i < span.num_rows; ++i) {
            of_token.push_back({data + i * row_stride, head_stride});
        }
    }

    std::vector<place> res(cells.size());
    for (size_t i = 0; i < res.size(); ++i) {
        res[i] = of_token[tokens[i]];
    }

    return res;
}

void llama_kvcache::state_reader::read_rows(int32_t layer, bool is_value) {
    const auto row = mem.state_row_of(layer, is_value);
    const char *name = is_value ? "values" : "keys";

    expect<int32_t>(row.type, "type", name, layer);
    expect<uint64_t>(row.n_bytes, "row size", name, layer);

    const auto places = places_of(layer, is_value);
    const size_t n_most = std::min(places.size(), std::max<size_t>(1, N_BUFFER / row.n_bytes));

    std::vector<uint8_t> rows(n_most * row.n_bytes);

    for (size_t first = 0, n; first < places.size(); first += n) {
        n = std::min(n_most, places.size() - first);
        io.read(rows.data(), n * row.n_bytes);

        for (size_t i = 0; i < n; ++i) {
            const auto &to = places[first + i];

            for (uint32_t h = 0; h < row.n_heads; ++h) {
                std::memcpy(to.data + h * to.head_stride, &rows[i * row.n_bytes + h * row.n_head_bytes],
                            row.n_head_bytes);
            }
        }
    }
}

void llama_kvcache::state_reader::read_transposed(int32_t layer) {
    const auto row = mem.state_row_of(layer, true);
    const size_t size = ggml_type_size(row.type);
    const size_t n_dims = row.n_elements / row.n_heads;

    expect<int32_t>(row.type, "type", "values", layer);
    expect<uint32_t>(size, "element size", "values", layer);
    expect<uint32_t>(row.n_elements, "number of elements", "values", layer);

    const auto places = places_of(layer, true);
    const size_t n_most = 64 / size; // columns at a time, so that cells are written by whole cache lines

    std::vector<uint8_t> columns(n_most * places.size() * size);

    for (size_t h = 0; h < row.n_heads; ++h) {
        for (size_t first = 0, n; first < n_dims; first += n) {
            n = std::min(n_most, n_dims - first);
            io.read(columns.data(), n * places.size() * size);

            for (size_t i = 0; i < places.size(); ++i) {
                uint8_t *to = places[i].data + h * places[i].head_stride + first * size;

                copy_elements(to, size, &columns[i * size], places.size() * size, n, size);
            }
        }
    }
}

void llama_kvcache::state_reader::read_stream(const state_part &part, uint32_t stream, uint32_t n_cells) {
    read_cells(part, stream, n_cells);

    const bool v_trans = read<uint32_t>();
    const uint32_t n_layer = read<uint32_t>();

    if (n_layer != part.layers.size()) {
        throw failure(format("mismatched layer count (%u instead of %zu)", n_layer, part.layers.size()));
    }
    if (part.layers.empty()) {
        return;
    }

    begin(part);

    for (const int32_t layer : part.layers) {
        read_rows(layer, false);
    }
    for (const int32_t layer : part.layers) {
        if (mem.layers.cache[layer].value_in_key) {
            continue;
        }
        if (v_trans && ggml_is_quantized(mem.layers.model[layer].type_v)) {
            throw failure(format("values of type %s are transposed", ggml_type_name(mem.layers.model[layer].type_v)));
        }
        if (v_trans) {
            read_transposed(layer);
        } else {
            read_rows(layer, true);
        }
    }
    for (const int32_t layer : part.layers) {
        llama_kvcache_check(kvc_written(batch.get(), layer, 0, (int32_t)cells.size()));
    }

    llama_kvcache_check(kvc_commit(batch.get()));
    batch.release();
}

void llama_kvcache::state_reader::read(const state_part &part) {
    const uint32_t n_found = read<uint32_t>();

    if (n_found != n_stream) {
        throw failure(format("mismatched number of streams (%u instead of %u)", n_found, n_stream));
    }

    for (uint32_t s = 0; s < n_stream; ++s) {
        if (const uint32_t n_cells = read<uint32_t>()) {
            read_stream(part, s, n_cells);
        }
    }
}

// returns what each source gives a sequence: where it has rows in layers with windows, the source of these has all
std::vector<llama_kvcache::state_reader::range> llama_kvcache::state_reader::ranges_of(llama_seq_id seq_id) const {
    const auto &windows = ranges[1][seq_id];

    std::vector<range> res = windows;

    auto w = windows.begin();
    for (range r : ranges[0][seq_id]) {
        for (; w != windows.end() && w->end <= r.begin; ++w) {
        }
        for (auto i = w; i != windows.end() && i->begin < r.end; ++i) {
            if (r.begin < i->begin) {
                res.push_back({r.begin, i->begin, r.source});
            }
            r.begin = i->end;
        }
        if (r.begin < r.end) {
            res.push_back(r);
        }
    }

    std::sort(res.begin(), res.end(), [](const range &a, const range &b) { return a.begin < b.begin; });

    return res;
}

void llama_kvcache::state_reader::share() {
    for (llama_seq_id s = 0; is_shared && s < (llama_seq_id)mem.cparams.n_seq_max; ++s) {
        for (const auto &r : ranges_of(s)) {
            llama_kvcache_check(kvc_share(mem.cache, id_of(r.source), s, r.begin, r.end));
        }
    }
    for (size_t i = 0; i < sources.size(); ++i) {
        llama_kvcache_check(kvc_clear_sequence(mem.cache, id_of((int32_t)i)));
    }
}

void llama_kvcache::state_read(llama_io_read_i &io, llama_seq_id seq_id, llama_state_seq_flags flags) {
    const uint32_t n_seqs = n_stream() > 1 ? n_stream() : LLAMA_MAX_SEQ;

    GGML_ASSERT(seq_id == -1 || (seq_id >= 0 && (uint32_t)seq_id < n_seqs));

    close();

    const auto parts = state_parts(flags);

    // layers that are not restored keep their rows
    if (seq_id == -1 || parts.size() == state_parts(LLAMA_STATE_SEQ_FLAGS_NONE).size()) {
        state_clear(seq_id);
    }

    try {
        state_reader reader(*this, io, seq_id);

        for (const auto &part : parts) {
            reader.read(part);
        }

        reader.share();
    } catch (...) {
        state_clear(seq_id);
        throw;
    }
}
