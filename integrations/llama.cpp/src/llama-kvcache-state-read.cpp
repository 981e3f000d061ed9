#include "llama-kvcache-state-read.h"

#include "llama-model.h"

#include <algorithm>

static constexpr size_t N_SCALE = 2; // bytes of a row's scale

std::runtime_error llama_kvcache_state_failure(const std::string &reason) {
    LLAMA_LOG_ERROR("llama_kvcache::state_read: %s\n", reason.c_str());

    return std::runtime_error("failed to restore the kv cache: " + reason);
}

llama_kvcache::state_reader::state_reader(llama_kvcache &mem, llama_io_read_i &io, llama_seq_id dest)
    : mem(mem), io(io), dest(dest), n_stream(mem.n_stream()), is_shared(dest == -1 && n_stream == 1),
      restored(mem.n_stream()), batch(nullptr, kvc_abort) {
    for (auto &r : ranges) {
        r.resize(mem.cparams.n_seq_max);
    }
}

int64_t llama_kvcache::state_reader::id_of(int32_t source) const {
    return is_shared ? sources[source].id : mem.id_of(source);
}

// returns the source that gives a sequence its row at a position in the layers without windows, -1 if there is none
int32_t llama_kvcache::state_reader::find_whole(llama_seq_id seq_id, llama_pos pos) const {
    const auto &r = ranges[0][seq_id];

    const auto next =
        std::upper_bound(r.begin(), r.end(), pos, [](llama_pos p, const range &other) { return p < other.begin; });

    return next == r.begin() || pos >= (next - 1)->end ? -1 : (next - 1)->source;
}

// returns the source of a cell of these sequences
int32_t llama_kvcache::state_reader::source_of(const state_part &part, const std::vector<llama_seq_id> &seq_ids,
                                               llama_pos pos) {
    const int32_t whole = part.has_windows ? find_whole(seq_ids[0], pos) : -1;

    if (whole >= 0 && sources[whole].seq_ids == seq_ids) {
        return whole;
    }

    const auto res = source_index.emplace(std::make_pair(whole, seq_ids), (int32_t)sources.size());

    if (res.second) {
        sources.push_back({seq_ids, kvc_new_sequence(mem.cache), whole});
    }

    return res.first->second;
}

std::vector<llama_seq_id> llama_kvcache::state_reader::read_seq_ids(uint32_t stream) {
    const uint32_t n = read<uint32_t>();

    if (mem.model.hparams.n_pos_per_embd() > 1) {
        read<llama_kv_cell_ext>();
    }
    if (n == 0 || n > (dest == -1 ? mem.cparams.n_seq_max : 1)) {
        throw llama_kvcache_state_failure(
            format("invalid number of sequences of a cell (%u, of %u)", n, mem.cparams.n_seq_max));
    }

    std::vector<llama_seq_id> res(n);
    for (auto &id : res) {
        id = read<llama_seq_id>();

        if (dest == -1 && (id < 0 || (uint32_t)id >= mem.cparams.n_seq_max)) {
            throw llama_kvcache_state_failure(
                format("invalid seq_id, %d is out of range [0, %u)", id, mem.cparams.n_seq_max));
        }
        if (dest == -1 && n_stream > 1 && (uint32_t)id != stream) {
            throw llama_kvcache_state_failure(format("invalid seq_id, %d is in stream %u", id, stream));
        }
    }

    std::sort(res.begin(), res.end());
    res.erase(std::unique(res.begin(), res.end()), res.end());

    return res;
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

        if (!sorted.empty() && sorted.back().source == c.source && c.pos <= sorted.back().end) {
            sorted.back().end = c.pos + 1;
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

std::vector<llama_kvcache::state_reader::saved_cell> llama_kvcache::state_reader::read_cells(uint32_t stream,
                                                                                             uint32_t n_cells) {
    if (n_cells > mem.cparams.n_ctx_seq) {
        throw llama_kvcache_state_failure(format("not enough cells (%u of %u)", n_cells, mem.cparams.n_ctx_seq));
    }

    std::vector<saved_cell> res;
    for (uint32_t i = 0; i < n_cells; ++i) {
        const llama_pos pos = read<llama_pos>();

        if (pos < 0 || pos == INT32_MAX) {
            throw llama_kvcache_state_failure(format("invalid position, %d is out of range [0, %d)", pos, INT32_MAX));
        }

        res.push_back({pos, read_seq_ids(stream)});
    }

    return res;
}

// finds where a sequence has several cells, as llama_memory_seq_div leaves them, that it does not share with the same
// others
void llama_kvcache::state_reader::find_mixed(const std::vector<saved_cell> &saved) {
    std::vector<const saved_cell *> sorted;
    for (const auto &c : saved) {
        sorted.push_back(&c);
    }
    std::sort(sorted.begin(), sorted.end(), [](const saved_cell *a, const saved_cell *b) { return a->pos < b->pos; });

    std::vector<const saved_cell *> latest(mem.cparams.n_seq_max, nullptr); // [sequence] that has it

    for (const auto *c : sorted) {
        for (const llama_seq_id id : c->seq_ids) {
            if (latest[id] && latest[id]->pos == c->pos && latest[id]->seq_ids != c->seq_ids) {
                mixed.insert(c->pos);
            }
            latest[id] = c;
        }
    }
}

void llama_kvcache::state_reader::set_cells(const state_part &part, uint32_t stream,
                                            const std::vector<saved_cell> &saved) {
    if (is_shared) {
        find_mixed(saved);
    }

    n_rows = (uint32_t)saved.size();

    cells.clear();
    for (int32_t row = 0; row < (int32_t)saved.size(); ++row) {
        const auto &c = saved[row];

        if (!is_shared) {
            cells.push_back({c.pos, dest == -1 ? (int32_t)stream : dest, row});
        } else if (mixed.count(c.pos) == 0) {
            cells.push_back({c.pos, source_of(part, c.seq_ids, c.pos), row});
        } else { // a copy for each sequence, so that one source gives it all that it has there
            for (const llama_seq_id id : c.seq_ids) {
                cells.push_back({c.pos, source_of(part, {id}, c.pos), row});
            }
        }
    }

    if (!part.is_index) {
        sort_cells(part);
    }
    if (mem.layers.choice.width > 0 && !part.has_windows) {
        find_restored(part, stream);
    }
}

void llama_kvcache::state_reader::begin(const state_part &part) {
    std::vector<int32_t> positions(cells.size());
    std::vector<int64_t> seq_ids(cells.size());

    for (size_t i = 0; i < cells.size(); ++i) {
        positions[tokens[i]] = cells[i].pos;
        seq_ids[tokens[i]] = id_of(cells[i].source);
    }

    batch = mem.begin_restored(positions, seq_ids, part.replaced);
}

std::vector<llama_kvcache::state_reader::place> llama_kvcache::state_reader::places_of(int32_t layer,
                                                                                       bool is_value) const {
    std::vector<place> of_token;

    while (of_token.size() < cells.size()) {
        kvc_span span;

        llama_kvcache_check(kvc_slots(batch.get(), layer, (int32_t)of_token.size(), &span, sizeof(span), nullptr));

        // slots are for writing
        auto *data = (uint8_t *)const_cast<void *>(is_value ? span.v : span.k);
        auto *scales = (uint8_t *)const_cast<void *>(is_value ? span.v_scales : span.k_scales);
        const int64_t head_stride = is_value ? span.v_head_stride : span.k_head_stride;
        const int64_t row_stride = is_value ? span.v_row_stride : span.k_row_stride;

        for (int32_t i = 0; i < span.num_rows; ++i) {
            of_token.push_back({data + i * row_stride, scales ? scales + i * N_SCALE : nullptr, head_stride});
        }
    }

    std::vector<place> res(cells.size());
    for (size_t i = 0; i < res.size(); ++i) {
        res[i] = of_token[tokens[i]];
    }

    return res;
}

void llama_kvcache::state_reader::expect_type(int32_t type, const char *of, int32_t layer) {
    const int32_t found = read<int32_t>();

    if (found != llama_kvcache_state_type(type)) {
        throw llama_kvcache_state_failure(format("mismatched type of %s (%s instead of %s, layer %d)", of,
                                                 llama_kvcache_state_type_name(found).c_str(), kvc_type_name(type),
                                                 mem.layers.model[layer].il));
    }
}

void llama_kvcache::state_reader::read_rows(int32_t layer, bool is_value) {
    const auto row = mem.state_row_of(layer, is_value);
    const char *name = is_value ? "values" : "keys";

    expect_type(row.type, name, layer);
    expect<uint64_t>(row.n_bytes, "row size", name, layer);

    if (row.n_bytes == 0) {
        return;
    }

    const auto places = places_of(layer, is_value);
    const size_t n_most = std::min<size_t>(n_rows, std::max<size_t>(1, N_BUFFER / row.n_bytes));

    std::vector<uint8_t> rows(n_most * row.n_bytes);

    for (size_t first = 0, n, i = 0; first < n_rows; first += n) {
        n = std::min<size_t>(n_most, n_rows - first);
        io.read(rows.data(), n * row.n_bytes);

        for (; i < places.size() && cells[i].row < (int32_t)(first + n); ++i) {
            const auto &to = places[i];
            const uint8_t *from = &rows[(cells[i].row - first) * row.n_bytes];

            const size_t n_scale = to.scale ? N_SCALE : 0; // behind the rest of a head's row
            const size_t n_rest = row.n_head_bytes - n_scale;

            for (uint32_t h = 0; h < row.n_heads; ++h, from += row.n_head_bytes) {
                std::memcpy(to.data + h * to.head_stride, from, n_rest);
                if (n_scale) {
                    std::memcpy(to.scale + h * to.head_stride, from + n_rest, n_scale);
                }
            }
        }
    }
}

void llama_kvcache::state_reader::read_transposed(int32_t layer) {
    const auto row = mem.state_row_of(layer, true);

    if (row.is_quantized()) {
        throw llama_kvcache_state_failure(format("values of type %s are transposed", kvc_type_name(row.type)));
    }

    const size_t size = row.n_element_bytes();

    expect_type(row.type, "values", layer);
    expect<uint32_t>(size, "element size", "values", layer);
    expect<uint32_t>(row.n_elements, "number of elements", "values", layer);

    if (row.n_bytes == 0) {
        return;
    }

    const size_t n_dims = row.n_elements / row.n_heads;
    const auto places = places_of(layer, true);
    const size_t n_most = 64 / size; // columns at a time, so that cells are written by whole cache lines

    std::vector<uint8_t> columns(n_most * n_rows * size);

    for (size_t h = 0; h < row.n_heads; ++h) {
        for (size_t first = 0, n; first < n_dims; first += n) {
            n = std::min(n_most, n_dims - first);
            io.read(columns.data(), n * n_rows * size);

            for (size_t i = 0; i < places.size(); ++i) {
                uint8_t *to = places[i].data + h * places[i].head_stride + first * size;

                copy_elements(to, size, &columns[cells[i].row * size], n_rows * size, n, size);
            }
        }
    }
}

void llama_kvcache::state_reader::read_stream(const state_part &part, uint32_t stream, uint32_t n_cells) {
    set_cells(part, stream, read_cells(stream, n_cells));

    const bool v_trans = read<uint32_t>();
    const uint32_t n_layer = read<uint32_t>();

    if (n_layer != part.layers.size()) {
        throw llama_kvcache_state_failure(
            format("mismatched layer count (%u instead of %zu)", n_layer, part.layers.size()));
    }
    if (part.layers.empty()) {
        return;
    }

    const bool has_values = !mem.model.hparams.is_mla(); // else they lie in the keys

    if (part.is_index) {
        for (const int32_t layer : part.layers) {
            read_index(layer);
        }
        for (const int32_t layer : part.layers) {
            if (has_values) {
                skip_values(layer, v_trans);
            }
        }
        return;
    }

    begin(part);

    for (const int32_t layer : part.layers) {
        read_rows(layer, false);
    }
    for (const int32_t layer : part.layers) {
        if (!has_values) {
            break;
        }
        if (v_trans) {
            read_transposed(layer);
        } else {
            read_rows(layer, true);
        }
    }
    for (int32_t layer = 0; layer < (int32_t)part.replaced.size(); ++layer) {
        if (part.replaced[layer] && mem.layers.cache[layer].share == 0) {
            llama_kvcache_check(kvc_written(batch.get(), layer, 0, (int32_t)cells.size()));
        }
    }

    llama_kvcache_check(kvc_commit(batch.get()));
    batch.release();
}

void llama_kvcache::state_reader::read(const state_part &part) {
    const uint32_t n_found = read<uint32_t>();

    if (n_found != n_stream) {
        throw llama_kvcache_state_failure(format("mismatched number of streams (%u instead of %u)", n_found, n_stream));
    }

    for (uint32_t s = 0; s < n_stream; ++s) {
        if (const uint32_t n_cells = read<uint32_t>()) {
            read_stream(part, s, n_cells);
        } else if (part.is_index && !restored[s].empty()) {
            throw llama_kvcache_state_failure("the indexer has no cells");
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
            llama_kvcache_check(kvc_share(mem.cache, id_of(r.source), mem.id_of(s), r.begin, r.end));
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
    last_failure.clear();

    const bool is_partial = has_partial_state() && (flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);

    // layers that are not restored keep their rows
    if (seq_id == -1 || !is_partial) {
        state_clear(seq_id);
    }

    try {
        if (has_strides()) {
            read_strided(io, seq_id, flags);
            return;
        }

        state_reader reader(*this, io, seq_id);

        for (const auto &part : state_parts(flags)) {
            reader.read(part);
        }

        reader.share();
    } catch (const std::exception &err) {
        last_failure = err.what();
        state_clear(seq_id);
        throw;
    }
}
