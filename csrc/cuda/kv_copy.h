// CUDA copies of whole cache blocks, without torch: pointers, sizes, a stream.
#pragma once

#include <cstdint>

// Copies block source_blocks[i] of `source` to block target_blocks[i] of `target` for i < count, in one kernel on
// `stream` (a cudaStream_t). Target, source and the id arrays lie in device memory, or in pinned host memory that the
// device sees under the host's address. Returns a cudaError_t, 0 for success.
extern "C" int vllm_cuda_copy_blocks(void* target, const void* source, const int64_t* target_blocks,
                                     const int64_t* source_blocks, int64_t count, int64_t block_bytes,
                                     int64_t target_stride_bytes, int64_t source_stride_bytes, void* stream);
