// Reads saved state: rows go from the stream into new rows of the cache, keys of indexers into rows that are there.
#pragma once

#include "llama-kvcache-state.h"

#include "llama-impl.h"
#include "llama-io.h"

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

class llama_kvcache::state_reader {
  public:
    // dest -1: of all sequences
    state_reader(llama_kvcache &mem, llama_io_read_i &io, llama_seq_id dest);

    void read(const state_part &part);

    // gives the sequences what they share
    void share();

  private:
    // a cell of the state
    struct saved_cell {
        llama_pos pos;
        std::vector<llama_seq_id> seq_ids; // ascending
    };

    // a token that is restored
    struct cell {
        llama_pos pos;
        int32_t source;
        int32_t row; // in the state
    };

    // Cells of the same sequences in both parts: a sequence of the cache holds their rows until share.
    struct source {
        std::vector<llama_seq_id> seq_ids;
        int64_t id;    // of the sequence of the cache
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
        uint8_t *scale; // null unless the row has one that lies apart
        int64_t head_stride;
    };

    template <typename T> T read() {
        T res;
        io.read(&res, sizeof(res));
        return res;
    }

    template <typename T> void expect(T value, const char *what, const char *of, int32_t layer);
    void expect_type(int32_t type, const char *of, int32_t layer);

    void read_stream(const state_part &part, uint32_t stream, uint32_t n_cells);
    std::vector<saved_cell> read_cells(uint32_t stream, uint32_t n_cells);
    std::vector<llama_seq_id> read_seq_ids(uint32_t stream);
    void find_mixed(const std::vector<saved_cell> &saved);
    void set_cells(const state_part &part, uint32_t stream, const std::vector<saved_cell> &saved);
    int32_t source_of(const state_part &part, const std::vector<llama_seq_id> &seq_ids, llama_pos pos);
    int32_t find_whole(llama_seq_id seq_id, llama_pos pos) const;
    void sort_cells(const state_part &part);
    std::vector<range> ranges_of(llama_seq_id seq_id) const;

    void begin(const state_part &part);
    std::vector<place> places_of(int32_t layer, bool is_value) const;
    void read_rows(int32_t layer, bool is_value);
    void read_transposed(int32_t layer);
    void read_index(int32_t layer);
    void skip_values(int32_t layer, bool is_transposed);

    void find_restored(const state_part &part, uint32_t stream);

    int64_t id_of(int32_t source) const;

    llama_kvcache &mem;
    llama_io_read_i &io;
    const llama_seq_id dest;
    const uint32_t n_stream;

    const bool is_shared; // cells belong to several sequences

    // of the stream
    uint32_t n_rows = 0;         // of a layer in the state
    std::vector<cell> cells;     // by rising row
    std::vector<int32_t> tokens; // [cell] of the batch

    std::vector<source> sources;
    std::map<std::pair<int32_t, std::vector<llama_seq_id>>, int32_t> source_index; // [whole, sequences]
    std::vector<std::vector<range>> ranges[2];                                     // [has windows][sequence] ascending
    std::set<llama_pos> mixed; // where a sequence would have cells of several sources

    // [stream] sources and positions of the cells with attention, ascending, for those of indexers
    std::vector<std::vector<std::pair<int32_t, llama_pos>>> restored;

    batch_ptr batch;
};

template <typename T>
void llama_kvcache::state_reader::expect(T value, const char *what, const char *of, int32_t layer) {
    const T found = read<T>();

    if (found != value) {
        throw llama_kvcache_state_failure(format("mismatched %s of %s (%lld instead of %lld, layer %d)", what, of,
                                                 (long long)found, (long long)value,
                                                 layer < 0 ? layer : mem.layers.model[layer].il));
    }
}
