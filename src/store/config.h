/* config.h: a caller's kvc_config: checks it and looks at its layers. */
#ifndef KVC_CONFIG_H
#define KVC_CONFIG_H

#include "kvcache.h"

/* Copies the caller's struct, checks it and all of its layers, and fills in a capacity that follows from other limits.
 */
kvc_status kvc_config_read(kvc_config *config, const kvc_config *given);

/* A copy of layer i. */
kvc_layer kvc_config_layer(const kvc_config *config, int32_t i);

/* The block size where the caller leaves it to the library. */
int32_t kvc_config_block_size(const kvc_config *config);

#endif
