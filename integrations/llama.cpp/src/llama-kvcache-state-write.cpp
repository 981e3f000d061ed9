#include "llama-kvcache-state.h"

#include "llama-io.h"
#include "llama-model.h"

#include <algorithm>
#include <map>
#include <utility>

class llama_kvcache::state_writer {
  public:
    state_writer(const llama_kvcache &mem, llama_io_write_i &io) : mem(mem), io(io) {}

    // seq_id -1: of all sequences
    void write(const state_part &part, llama_seq_id seq_id);

  private:
    // rows of a sequence, in order of arrival, at consecutive positions
    struct piece {
        llama_seq_id seq_id;
        int64_t row;
        int64_t n_rows;
        llama_pos pos;
        std::vector<llama_seq_id> seq_ids; // that have them
    };

    template <typename T> void write(T value) { io.write(&value, sizeof(value)); }

    // consecutive slots of a sequence
    struct run {
        llama_seq_id seq_id;
        kvc_run_info at;
        int64_t row; // of the first
    };

    std::vector<run> runs_of(const state_part &part, llama_seq_id seq_id) const;
    llama_pos first_saved(llama_pos pos_max, bool is_whole) const;
    void leave_out(std::vector<run> &runs, bool is_whole) const;

    void find_pieces(const std::vector<run> &runs);
    void split_run(const run &r, const std::vector<run> &others);

    void write_meta(llama_seq_id seq_id);
    void write_rows(int32_t layer, bool is_value);
    void write_transposed(int32_t layer);

    // calls visit(rows, n) for all rows, n of them at a time
    template <typename F> void visit_rows(int32_t layer, bool is_value, F visit);

    const llama_kvcache &mem;
    llama_io_write_i &io;

    std::vector<piece> pieces;
    int64_t n_cells = 0;
};

// those of a sequence, or of all that the context counts, as in llama.cpp
std::vector<llama_kvcache::state_writer::run> llama_kvcache::state_writer::runs_of(const state_part &part,
                                                                                   llama_seq_id seq_id) const {
    int64_t n_blocks;
    int64_t n_runs;

    llama_kvcache_check(kvc_blocks(mem.cache, part.first, nullptr, sizeof(kvc_block_info), 0, &n_blocks, nullptr,
                                   sizeof(kvc_run_info), 0, &n_runs));

    std::vector<kvc_run_info> found(n_runs);

    llama_kvcache_check(kvc_blocks(mem.cache, part.first, nullptr, sizeof(kvc_block_info), 0, &n_blocks, found.data(),
                                   sizeof(kvc_run_info), n_runs, &n_runs));

    std::vector<run> res;

    // by rising sequence of the context
    const llama_seq_id first = seq_id == -1 ? 0 : seq_id;
    const llama_seq_id end = seq_id == -1 ? (llama_seq_id)mem.cparams.n_seq_max : seq_id + 1;

    for (llama_seq_id s = first; s < end; ++s) {
        const int64_t id = mem.id_of(s);
        int64_t row = 0;

        for (const auto &at : found) {
            if (at.seq_id == id && !at.in_batch && !at.is_kept) {
                res.push_back({s, at, row});
                row += at.count;
            }
        }
    }

    return res;
}

// Returns the first position that is saved of layers with windows.  Of one sequence, it is what the last token sees; of
// all, what llama.cpp's cache has cells for.
llama_pos llama_kvcache::state_writer::first_saved(llama_pos pos_max, bool is_whole) const {
    const auto &hparams = mem.model.hparams;
    const auto &cparams = mem.cparams;

    llama_pos res = 0;
    while (res < pos_max && llama_hparams::is_masked_swa(hparams.n_swa, hparams.swa_type, res, pos_max)) {
        ++res;
    }

    if (!is_whole) {
        return res;
    }

    const uint32_t n_seqs = cparams.kv_unified ? cparams.n_seq_max : 1;
    const uint32_t n_cells = GGML_PAD(hparams.n_swa * n_seqs + cparams.n_ubatch, 256);
    const bool has_all = mem.windows_keep_all() || n_cells >= cparams.n_ctx_seq;

    return has_all ? 0 : std::max(0, std::min(res, pos_max - (llama_pos)(n_cells / n_seqs) + 1));
}

void llama_kvcache::state_writer::leave_out(std::vector<run> &runs, bool is_whole) const {
    std::map<llama_seq_id, llama_pos> first; // [sequence]

    for (const auto &r : runs) {
        auto &pos_max = first.emplace(r.seq_id, -1).first->second;

        pos_max = std::max(pos_max, r.at.position + r.at.count - 1);
    }
    for (auto &f : first) {
        f.second = first_saved(f.second, is_whole);
    }
    for (auto &r : runs) {
        const int32_t n = std::min(r.at.count, std::max(0, first[r.seq_id] - r.at.position));

        r.at.slot += n;
        r.at.position += n;
        r.at.count -= n;
        r.row += n;
    }
}

// rows that lie in the same slots, at the same positions, are written once
void llama_kvcache::state_writer::find_pieces(const std::vector<run> &runs) {
    std::map<std::pair<int32_t, int32_t>, std::vector<run>> alike; // [block, position of slot 0]

    for (const auto &r : runs) {
        alike[{r.at.block, r.at.position - r.at.slot}].push_back(r);
    }

    pieces.clear();
    for (const auto &r : runs) {
        split_run(r, alike[{r.at.block, r.at.position - r.at.slot}]);
    }

    n_cells = 0;
    for (const auto &p : pieces) {
        n_cells += p.n_rows;
    }
}

void llama_kvcache::state_writer::split_run(const run &r, const std::vector<run> &others) {
    const int32_t end = r.at.slot + r.at.count;

    for (int32_t slot = r.at.slot, next; slot < end; slot = next) {
        std::vector<llama_seq_id> seq_ids; // ascending, as runs are

        next = end;
        for (const auto &other : others) {
            if (other.at.slot > slot) {
                next = std::min(next, other.at.slot);
            } else if (slot < other.at.slot + other.at.count) {
                next = std::min(next, other.at.slot + other.at.count);
                seq_ids.push_back(other.seq_id);
            }
        }

        if (seq_ids.front() == r.seq_id) {
            const int32_t skipped = slot - r.at.slot;

            pieces.push_back({r.seq_id, r.row + skipped, next - slot, r.at.position + skipped, std::move(seq_ids)});
        }
    }
}

void llama_kvcache::state_writer::write_meta(llama_seq_id seq_id) {
    for (const auto &p : pieces) {
        for (int64_t i = 0; i < p.n_rows; ++i) {
            write<llama_pos>(p.pos + (llama_pos)i);
            write<uint32_t>(seq_id == -1 ? (uint32_t)p.seq_ids.size() : 1);
            if (mem.model.hparams.n_pos_per_embd() > 1) {
                // As of a token of text: tokens behind an image see all of it.
                write(llama_kv_cell_ext{p.pos + (llama_pos)i, p.pos + (llama_pos)i, LLAMA_TOKEN_NULL});
            }

            for (const llama_seq_id id : p.seq_ids) {
                write<llama_seq_id>(id);
            }
        }
    }
}

template <typename F> void llama_kvcache::state_writer::visit_rows(int32_t layer, bool is_value, F visit) {
    const auto row = mem.state_row_of(layer, is_value);

    if (row.n_bytes == 0) {
        return;
    }

    const bool is_stored = !is_value || !mem.layers.model[layer].is_index; // else bytes of 0
    const int64_t n_most = std::max<int64_t>(1, N_BUFFER / row.n_bytes);

    std::vector<uint8_t> rows(std::min(n_most, n_cells) * row.n_bytes);

    kvc_rows_out out = {};

    out.struct_size = sizeof(out);
    out.raw = 1;
    out.k = is_value ? nullptr : rows.data();
    out.v = is_value ? rows.data() : nullptr;
    out.k_head_stride = out.v_head_stride = row.n_head_bytes;
    out.k_row_stride = out.v_row_stride = row.n_bytes;

    for (size_t i = 0, n_pieces; i < pieces.size(); i += n_pieces) {
        int64_t n_rows = pieces[i].n_rows; // of pieces that follow each other in their sequence

        for (n_pieces = 1; i + n_pieces < pieces.size(); ++n_pieces) {
            const auto &next = pieces[i + n_pieces];

            if (next.seq_id != pieces[i].seq_id || next.row != pieces[i].row + n_rows) {
                break;
            }

            n_rows += next.n_rows;
        }

        for (int64_t first = 0, n; first < n_rows; first += n) {
            n = std::min(n_most, n_rows - first);
            if (is_stored) {
                llama_kvcache_check(
                    kvc_gather(mem.cache, mem.id_of(pieces[i].seq_id), layer, pieces[i].row + first, n, &out));
            }
            visit(rows.data(), n);
        }
    }
}

void llama_kvcache::state_writer::write_rows(int32_t layer, bool is_value) {
    const auto row = mem.state_row_of(layer, is_value);

    write<int32_t>(llama_kvcache_state_type(row.type));
    write<uint64_t>(row.n_bytes);

    visit_rows(layer, is_value, [&](const uint8_t *rows, int64_t n) { io.write(rows, n * row.n_bytes); });
}

void llama_kvcache::state_writer::write_transposed(int32_t layer) {
    const auto row = mem.state_row_of(layer, true);
    const size_t size = row.n_element_bytes();

    write<int32_t>(llama_kvcache_state_type(row.type));
    write<uint32_t>(size);
    write<uint32_t>(row.n_elements);

    std::vector<uint8_t> columns(n_cells * row.n_bytes);

    uint8_t *to = columns.data();
    visit_rows(layer, true, [&](const uint8_t *rows, int64_t n) {
        for (uint32_t j = 0; j < row.n_elements; ++j) {
            copy_elements(to + j * n_cells * size, size, rows + j * size, row.n_bytes, n, size);
        }
        to += n * size;
    });

    io.write(columns.data(), columns.size());
}

void llama_kvcache::state_writer::write(const state_part &part, llama_seq_id seq_id) {
    const uint32_t n_stream = mem.n_stream();
    const bool v_trans = !mem.cparams.flash_attn && !mem.state_row_of(0, true).is_quantized();

    write<uint32_t>(n_stream);

    for (uint32_t s = 0; s < n_stream; ++s) {
        // a stream of several holds the sequence of its number
        const bool is_empty = n_stream > 1 && seq_id != -1 && seq_id != (llama_seq_id)s;

        auto runs = is_empty ? std::vector<run>() : runs_of(part, n_stream > 1 ? s : seq_id);

        if (part.has_windows || part.layers.empty()) { // without layers, those of the layers with windows
            leave_out(runs, seq_id == -1);
        }
        find_pieces(runs);

        write<uint32_t>(n_cells);
        if (n_cells == 0) {
            continue;
        }

        write_meta(seq_id);
        write<uint32_t>(v_trans);
        write<uint32_t>(part.layers.size());

        for (const int32_t layer : part.layers) {
            write_rows(layer, false);
        }
        for (const int32_t layer : part.layers) {
            if (mem.model.hparams.is_mla()) {
                break; // values lie in the keys
            }
            if (v_trans) {
                write_transposed(layer);
            } else {
                write_rows(layer, true);
            }
        }
    }
}

void llama_kvcache::state_write(llama_io_write_i &io, llama_seq_id seq_id, llama_state_seq_flags flags) const {
    GGML_ASSERT(seq_id == -1 || has_seq(seq_id));

    if (has_strides()) {
        write_strided(io, seq_id, flags);
        return;
    }

    state_writer writer(*this, io);

    for (const auto &part : state_parts(flags)) {
        writer.write(part, seq_id);
    }
}
