/* config.h: checks a caller's kvc_config and reads its layers. */
#ifndef KVC_CONFIG_H
#define KVC_CONFIG_H

#include "kvcache.h"

/* Copies the caller's struct, checks it and its layers, and fills in a capacity that follows from other limits. */
kvc_status kvc_config_read(kvc_config *config, const kvc_config *given);

/* Returns a copy of layer i. */
kvc_layer kvc_config_layer(const kvc_config *config, int32_t i);

/* Returns the block size for a caller who leaves it to the library. */
int32_t kvc_config_block_size(const kvc_config *config);

#endif
