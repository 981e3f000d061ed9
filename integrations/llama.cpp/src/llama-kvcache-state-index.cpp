// The keys of indexers in a saved state: they belong to tokens whose other rows were read before.
#include "llama-kvcache-state-read.h"

#include "llama-model.h"

#include <algorithm>

// Keys of an indexer go into rows that are there, found by their positions.
void llama_kvcache::state_reader::find_restored(const state_part &part, uint32_t stream) {
    std::vector<std::pair<int32_t, llama_pos>> found;

    for (const auto &c : cells) {
        found.emplace_back(c.source, c.pos);
    }
    std::sort(found.begin(), found.end());

    if (part.is_index && found != restored[stream]) {
        throw llama_kvcache_state_failure("the indexer has other cells than the attention");
    }
    if (std::adjacent_find(found.begin(), found.end()) != found.end()) {
        throw llama_kvcache_state_failure("a sequence has several tokens at one position, and the model an indexer");
    }

    restored[stream] = std::move(found);
}

void llama_kvcache::state_reader::read_index(int32_t layer) {
    const auto row = mem.state_row_of(layer, false);

    expect_type(row.type, "index keys", layer);
    expect<uint64_t>(row.n_bytes, "row size", "index keys", layer);

    const size_t n_most = std::min<size_t>(n_rows, std::max<size_t>(1, N_BUFFER / row.n_bytes));

    std::vector<uint8_t> rows(n_most * row.n_bytes);

    kvc_rows_in in = {};

    in.struct_size = sizeof(in);
    in.k_type = row.type;
    in.k_row_stride = row.n_bytes;
    in.k_head_stride = row.n_bytes;

    for (size_t first = 0, n, i = 0; first < n_rows; first += n) {
        n = std::min<size_t>(n_most, n_rows - first);
        io.read(rows.data(), n * row.n_bytes);

        for (size_t end; i < cells.size() && cells[i].row < (int32_t)(first + n); i = end) {
            const auto &c = cells[i];
            const auto follows = [&](size_t j) {
                const int32_t n_before = (int32_t)(j - i);

                return cells[j].source == c.source && cells[j].pos == c.pos + n_before &&
                       cells[j].row == c.row + n_before && cells[j].row < (int32_t)(first + n);
            };

            for (end = i + 1; end < cells.size() && follows(end);) {
                ++end;
            }
            in.k = &rows[(c.row - first) * row.n_bytes];
            llama_kvcache_check(
                kvc_inject(mem.cache, id_of(c.source), layer, c.pos, c.pos + (llama_pos)(end - i), &in));
        }
    }
}

// llama.cpp has values beside the keys of an indexer, which nobody reads
void llama_kvcache::state_reader::skip_values(int32_t layer, bool is_transposed) {
    const auto row = mem.state_row_of(layer, true);

    expect_type(row.type, "index values", layer);
    if (is_transposed) {
        expect<uint32_t>(row.n_element_bytes(), "element size", "index values", layer);
        expect<uint32_t>(row.n_elements, "number of elements", "index values", layer);
    } else {
        expect<uint64_t>(row.n_bytes, "row size", "index values", layer);
    }

    std::vector<uint8_t> unread(row.n_bytes);

    for (uint32_t i = 0; i < n_rows; ++i) {
        io.read(unread.data(), unread.size());
    }
}
