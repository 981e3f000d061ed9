#include "llama-kvcache.h"
#include <stdexcept>
void llama_kvcache::state_write(llama_io_write_i &, llama_seq_id, llama_state_seq_flags) const {
    throw std::runtime_error("not yet");
}
void llama_kvcache::state_read(llama_io_read_i &, llama_seq_id, llama_state_seq_flags) {
    throw std::runtime_error("not yet");
}
