// llama.cpp's memory on libkvcache: keys and values lie in a kvc_cache, and attention is a graph operation whose
// threads run the tasks of a kvc_plan.
#pragma once

#include "llama-batch.h"
#include "llama-cparams.h"
#include "llama-graph.h"
#include "llama-kvcache-model.h"
#include "llama-kvcache-store.h"
#include "llama-memory.h"

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

struct llama_model;

class llama_kvcache;
class llama_memory_recurrent;

// returns a memory on libkvcache if LLAMA_KVCACHE=1 asks for it and the model and the options are served, else nullptr
llama_memory_i *llama_kvcache_create(const llama_model &model, const llama_memory_params &params,
                                     const llama_cparams &cparams);

// returns what LLAMA_KVCACHE_PREFIX asks for: on, or the address of a store; empty: nothing.  Throws where it is
// neither.
std::string llama_kvcache_prefix_asked_for();

// Returns whether a call succeeded; if not, the log says why.  For functions that cannot say so themselves.
bool llama_kvcache_logged(const char *func, kvc_status status);

// Ends the process unless a call of a graph's operation succeeded: ggml has no way to report that one failed.  All that
// can fail was done before the graph.
void llama_kvcache_check_op(kvc_status status);

// takes the memory of the caches that are created next; nullptr: what the library does by itself.  For tests.
extern const kvc_allocator *llama_kvcache_allocator;

// what the operations of a layer are called with: its address stays, so that graphs can be reused
struct llama_kvcache_op {
    const llama_kvcache *mem = nullptr;
    int32_t layer = -1; // of the cache
    int32_t shape = -1;
    float scale = 0.0f;
    float softcap = 0.0f;
    int32_t sinks = -1;        // which argument of the operation it is, -1: there are none
    int32_t chosen = -1;       // the rows that tokens attend to
    int32_t weights = -1;      // of the indexer's heads
    int32_t prior = -1;        // what attention to other rows gave, which these join
    bool has_lse = false;      // the result has the log-sum-exps behind it, for the rows that join
    std::vector<float> slopes; // ALiBi, [n_head]
    std::atomic<int64_t> next_task{0};
};

// rows are read element by element
ggml_tensor *with_dense_rows(ggml_context *ctx, ggml_tensor *cur);

class llama_kvcache : public llama_memory_i, public llama_memory_attn_i, public llama_memory_kvcache_i {
  public:
    // recr: the other part of a hybrid memory, whose states belong to prompts; nullptr: there is none
    llama_kvcache(const llama_model &model, const llama_cparams &cparams, llama_kvcache_layers layers,
                  llama_memory_recurrent *recr = nullptr);
    ~llama_kvcache() override;

    //
    // llama_memory_i
    //

    llama_memory_context_ptr init_batch(llama_batch_allocr &balloc, uint32_t n_ubatch, bool embd_all) override;
    llama_memory_context_ptr init_full() override;
    llama_memory_context_ptr init_update(llama_context *lctx, bool optimize) override;

    bool get_can_shift() const override;

    // Says in the log why seq_rm would refuse, where it would.
    bool can_remove(llama_seq_id seq_id, llama_pos p0, llama_pos p1);

    // seq_cp, seq_add and seq_div.  They return false, with the reason in the log, if the cache refuses.
    bool copy(llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos p0, llama_pos p1);
    bool shift(llama_seq_id seq_id, llama_pos p0, llama_pos p1, llama_pos shift);
    bool divide(llama_seq_id seq_id, llama_pos p0, llama_pos p1, int d);

    void clear(bool data) override;

    bool seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) override;
    void seq_cp(llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos p0, llama_pos p1) override;
    void seq_keep(llama_seq_id seq_id) override;
    void seq_add(llama_seq_id seq_id, llama_pos p0, llama_pos p1, llama_pos shift) override;
    void seq_div(llama_seq_id seq_id, llama_pos p0, llama_pos p1, int d) override;

    llama_pos seq_pos_min(llama_seq_id seq_id) const override;
    llama_pos seq_pos_max(llama_seq_id seq_id) const override;

    std::map<ggml_backend_buffer_type_t, size_t> memory_breakdown() const override;

    void state_write(llama_io_write_i &io, llama_seq_id seq_id, llama_state_seq_flags flags) const override;
    void state_read(llama_io_read_i &io, llama_seq_id seq_id, llama_state_seq_flags flags) override;

    //
    // llama_memory_kvcache_i
    //

    llama_memory_kvcache_i *get_kvcache() override { return this; }

    const char *description() const override { return summary.c_str(); }
    const char *metrics() override;
    const char *failure() const override { return last_failure.c_str(); }

    bool has_prefix() const override;
    int32_t prefix_block() const override;
    int32_t prefix_begin(llama_seq_id seq_id, const llama_memory_prompt &prompt, int32_t n_held) override;
    void prefix_keep(llama_seq_id seq_id, const llama_memory_prompt &prompt) override;
    void prefix_steer(const float *data, size_t len, int32_t il_start, int32_t il_end) override;

    // whether a partial state has rows of some layers
    bool has_partial_state() const;

    // undoes state_read, for a memory of several parts of which another could not be read
    void state_clear(llama_seq_id seq_id);

    //
    // a batch: begun for all its ubatches, which are computed one after the other
    //

    // returns a context that computes these ubatches, however they were split
    llama_memory_context_ptr init_ubatches(std::vector<llama_ubatch> ubatches);

    // makes room for the tokens of these ubatches; when it fails, nothing has changed
    kvc_status begin(const llama_ubatch *ubatches, size_t n_ubatches);

    // plans the attention of the batch's next ubatch
    kvc_status plan(const llama_ubatch &ubatch);

    // says in the log why a decode fails, and keeps it for failure(); empty: none has failed
    void note_failure(const char *func, const std::string &reason);

    // ends the ubatch that was planned last: its tokens stay
    void finish();

    // makes the tokens of an ubatch of coupled tokens those of all their sequences
    void share(const llama_ubatch &ubatch);

    // ends the batch: what was finished stays.  Does nothing if there is none.
    void close();

    //
    // llama_memory_attn_i
    //

    ggml_tensor *build_pool(const llm_graph_context &graph, ggml_tensor *values, ggml_tensor *gates, ggml_tensor *bias,
                            ggml_tensor **pos, int il) const override;
    ggml_tensor *build_choose(const llm_graph_context &graph, ggml_tensor *q, ggml_tensor *k, ggml_tensor *weights,
                              int il) const override;
    ggml_tensor *build_attn(const llm_graph_context &graph, ggml_tensor *wo, ggml_tensor *wo_b, ggml_tensor *wo_s,
                            ggml_tensor *q, ggml_tensor *k, ggml_tensor *v, ggml_tensor *sinks, ggml_tensor *v_mla,
                            ggml_tensor *chosen, float kq_scale, int il) const override;

    // the n tokens before each of the ubatch's, the oldest first; LLAMA_TOKEN_NULL: there is none
    void get_prev_tokens(const llama_ubatch &ubatch, uint32_t n, std::vector<llama_token> &res) const override;

    // DeepSeek V4
    ggml_tensor *build_attn_dsv4(const llm_graph_context &graph, ggml_tensor *q, ggml_tensor *kv, ggml_tensor *qr,
                                 ggml_tensor *cur, ggml_tensor *pos, int il) const override;

    //
    // the graph's operations
    //

    // what a token adds to a row that stands for several
    struct pool_input {
        const float *elements;
        const float *gates; // null: all tokens weigh the same
        const float *bias;  // of the gates, by the position in a block; null: 0
    };

    void pool(const llama_kvcache_op &op, ggml_tensor *dst, int ith, int nth) const;
    void begins(const llama_kvcache_op &op, ggml_tensor *dst) const;
    void store(const llama_kvcache_op &op, const ggml_tensor *k, const ggml_tensor *v, int ith, int nth) const;
    void choose(llama_kvcache_op &op, ggml_tensor *dst) const;
    void attend(llama_kvcache_op &op, ggml_tensor *dst) const;

  private:
    // the bytes that rows take at most
    size_t most_bytes() const;

    // whether layers have a row for a block of tokens
    bool has_strides() const { return layers.stride > 1; }

    // whether rows are made of those of several tokens
    bool has_inputs() const { return has_strides() || layers.tokens >= 0; }

    struct strided_part;

    std::vector<strided_part> strided_parts(llama_state_seq_flags flags) const;
    void write_layout(llama_io_write_i &io, llama_state_seq_flags flags) const;
    void write_part(llama_io_write_i &io, const strided_part &part, int64_t id, llama_pos n_tokens) const;
    void write_strided(llama_io_write_i &io, llama_seq_id seq_id, llama_state_seq_flags flags) const;
    void read_layout(llama_io_read_i &io, llama_state_seq_flags flags) const;
    void read_layer(llama_io_read_i &io, kvc_batch *to, int32_t layer, llama_pos first, llama_pos n_tokens);
    void read_part(llama_io_read_i &io, const strided_part &part, int64_t id, llama_pos n_tokens);
    void read_strided(llama_io_read_i &io, llama_seq_id seq_id, llama_state_seq_flags flags);

    using batch_ptr = std::unique_ptr<kvc_batch, void (*)(kvc_batch *)>;

    // begins a batch of saved rows, for the layers that are replaced
    batch_ptr begin_restored(const std::vector<int32_t> &positions, const std::vector<int64_t> &seq_ids,
                             const std::vector<uint8_t> &replaced);

    struct state_part;
    struct state_row;
    class state_writer;
    class state_reader;

    state_part state_part_of(bool is_swa, bool is_index) const;
    std::vector<state_part> state_parts(llama_state_seq_flags flags) const;
    state_row state_row_of(int32_t layer, bool is_value) const;
    uint32_t n_stream() const;

    // layers with windows keep all rows
    bool windows_keep_all() const;

    // whether the decode's ubatches are begun one by one: coupled tokens are shared at the end of an ubatch, for others
    // to see from the next one on; and tokens that see later ones see those of their own ubatch only
    bool is_one_by_one(const std::vector<llama_ubatch> &ubatches) const;

    // returns the prefix for rows that these adapters make, nullptr, with the reason in the log, if there is none
    kvc_prefix *prefix_of(const char *adapters);

    // sees to it that no prompt is kept whose recurrent state is not behind its tokens: a part was copied, say, or a
    // decode was broken off
    void check_states(const std::vector<llama_ubatch> &ubatches);

    // Takes the recurrent states of sequences that continue at the end of a block, where a store can have them.
    void take_states(const std::vector<llama_ubatch> &ubatches);

    // returns the most bytes of a sequence's recurrent state; 0 if there is none
    int64_t most_state_bytes() const;

    // returns the most bytes that a store takes for a block
    int64_t most_value_bytes() const;

    bool restore_state(kvc_prefix *prefix, llama_seq_id seq_id, int64_t id, int32_t n_known);

    // Returns why tokens do not go on behind those that llama_memory_seq_cp was to copy, empty if they do.  It cannot
    // say itself that memory was refused.
    std::string copy_refusal(const std::vector<llama_ubatch> &ubatches);

    // returns why keys cannot be pooled of the tokens of these ubatches, empty if they can
    std::string stride_refusal(const std::vector<llama_ubatch> &ubatches) const;

    // what the planned ubatch has of a sequence, and what it asks for from before
    struct sequence_inputs {
        int64_t id;                                  // of the cache
        llama_pos first;                             // position of its first token in the ubatch
        std::vector<int32_t> tokens;                 // of the ubatch, by rising position, one after the other
        std::map<int32_t, std::vector<float>> known; // [layer of inputs] rows before `first`, from first_known on
    };

    kvc_status find_inputs(const llama_ubatch &ubatch);
    kvc_status find_known(int32_t layer, sequence_inputs &of);
    llama_pos first_known(int32_t layer, llama_pos first) const;

    // returns the row at a position of a sequence; rows: those of the ubatch
    const float *input_of(int32_t layer, size_t i_seq, llama_pos pos, const ggml_tensor *rows) const;

    // stores the numbers of the ubatch's tokens, where the model asks for those before a token
    kvc_status put_tokens(const llama_ubatch &ubatch);

    ggml_tensor *build_store(const llm_graph_context &graph, llama_kvcache_op &op, ggml_tensor *k, ggml_tensor *v,
                             int il) const;
    ggml_tensor *build_attend(const llm_graph_context &graph, llama_kvcache_op &op, ggml_tensor *q, ggml_tensor *sinks,
                              ggml_tensor *chosen, ggml_tensor *prior, ggml_tensor *stored) const;

    // a token of an ubatch that completes a block
    struct last_token {
        size_t i_seq; // its sequence, in `inputs`
        llama_pos pos;
    };

    // returns the tokens of the planned ubatch that complete blocks of n
    std::vector<last_token> last_tokens(int32_t n) const;

    std::vector<pool_input> inputs_of(const llama_kvcache_op &op, const ggml_tensor *dst, const last_token &last) const;

    ggml_tensor *build_pool_of(const llm_graph_context &graph, int32_t layer, ggml_tensor *values, ggml_tensor *gates,
                               ggml_tensor *bias, ggml_tensor **pos, int il) const;

    // the weights by which rows that stand for several tokens are computed
    struct compressor {
        ggml_tensor *kv;
        ggml_tensor *gate;
        ggml_tensor *bias; // of the gates, by the position in a block
        ggml_tensor *norm;
    };

    ggml_tensor *build_compressed(const llm_graph_context &graph, int32_t inputs, const compressor &weights,
                                  ggml_tensor *cur, int il) const;
    ggml_tensor *build_choose_dsv4(const llm_graph_context &graph, ggml_tensor *qr, ggml_tensor *cur, ggml_tensor *pos,
                                   int il) const;

    bool has_seq(llama_seq_id seq_id) const { return seq_id >= 0 && (size_t)seq_id < ids.size(); }

    // Returns which sequence of the cache a sequence of the context is.  Ends the process if there is no such sequence,
    // as llama.cpp's own cache does.
    int64_t id_of(llama_seq_id seq_id) const;

    bool can_move(const char *func) const;

    // as can_remove and seq_rm, for one sequence, and positions [p0, p1)
    bool can_remove_of(llama_seq_id seq_id, llama_pos p0, llama_pos p1) const;
    bool remove(llama_seq_id seq_id, llama_pos p0, llama_pos p1);

    // whether the i-th token of an ubatch selects rows, in layers with sketches: it is the only one that its sequences
    // have in the decode, and continues a long text.  Prompts, and guesses to be verified, read all rows.
    bool selects(const llama_ubatch &ubatch, uint32_t i) const;

    // whether it attends to chosen rows, in layers where tokens choose: it may see more than it can choose
    bool chooses(const llama_ubatch &ubatch, uint32_t i) const;

    // plans what an ubatch does in the layers of a shape
    kvc_status plan_shape(const llama_ubatch &ubatch, int32_t shape);

    // runs the tasks of the operation's plans that no other thread has taken, by run(part, task)
    template <typename F> void run_tasks(llama_kvcache_op &op, F run) const;

    void free_plans();
    bool is_causal(const llama_kvcache_layer &layer) const;

    const llama_model &model;
    const llama_cparams &cparams; // the context's own: threads and causality change between calls

    const llama_kvcache_layers layers;

    llama_memory_recurrent *const recr;

    kvc_cache *cache = nullptr;

    std::string summary;      // of what the cache holds
    std::string last_metrics; // which were asked for
    std::string last_failure; // of a decode, unless there was no room, or of state_read

    std::vector<int64_t> ids; // [sequence of the context] which one of the cache it is, for id_of

    const std::string prefix_spec;                     // empty: there are no prefixes
    std::unique_ptr<llama_kvcache_store> prefix_store; // nullptr: they stay in memory
    std::string identity;                              // of the model, where there is a store
    std::string steering;                              // of the control vectors
    std::map<std::string, kvc_prefix *> prefixes;      // [fingerprint] freed with the cache

    // the recurrent state of a sequence behind its first tokens, which end a block
    struct block_state {
        llama_pos n_tokens;
        std::vector<uint8_t> data;
    };

    std::map<llama_seq_id, std::string> lacking; // what a copy was refused for, until the sequence is fed

    std::map<llama_seq_id, block_state> block_states; // the last ones, until they are kept with a prompt

    std::vector<std::unique_ptr<llama_kvcache_op>> ops; // [layer of the cache]

    // consecutive tokens of an ubatch, all of which read a part of the rows, or none
    struct planned {
        int32_t first;
        bool is_part;
        kvc_plan *plan;
    };

    std::vector<int32_t> n_decoded; // [sequence of the context] its tokens in this decode

    // the open batch
    kvc_batch *batch = nullptr;
    int32_t n_done = 0;                      // tokens of the ubatches that were finished
    int32_t n_cur = 0;                       // tokens of the ubatch that is planned
    std::vector<int64_t> cur_ids;            // [token of the ubatch] its sequence in the cache
    std::vector<sequence_inputs> inputs;     // where rows are pooled
    std::vector<std::vector<planned>> plans; // [shape]
};

class llama_kvcache_context : public llama_memory_context_i {
  public:
    llama_kvcache_context(llama_kvcache *mem, llama_memory_status status);
    llama_kvcache_context(llama_kvcache *mem, std::vector<llama_ubatch> ubatches, bool is_one_by_one);
    ~llama_kvcache_context() override;

    bool next() override;
    bool apply() override;

    const llama_ubatch &get_ubatch() const override;
    llama_memory_status get_status() const override;

    const llama_memory_attn_i *get_attn_impl() const override { return mem; }

  private:
    llama_kvcache *mem;

    llama_memory_status status;

    std::vector<llama_ubatch> ubatches;

    size_t i_cur = 0;

    // each ubatch is a batch of its own
    bool is_one_by_one = false;
};
