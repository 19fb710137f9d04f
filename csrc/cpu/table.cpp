// The kernels of one instruction set as a table.
#include "../ops.h"

#define VLLM_STRING_(x) #x
#define VLLM_STRING(x) VLLM_STRING_(x)

namespace vllm_native {
namespace VLLM_ISA {

void rms_norm(const RmsNormArgs&, int64_t, int64_t);
void silu_and_mul(const SiluMulArgs&, int64_t, int64_t);
void rotary(const RotaryArgs&, int64_t, int64_t);
void write_kv(const WriteKvArgs&, int64_t, int64_t);
void copy_rows(const CopyRowsArgs&, int64_t, int64_t);
void decode_attention(const DecodeAttentionArgs&, int64_t, int64_t);
void merge_decode_parts(const DecodeAttentionArgs&, int64_t, int64_t);
void linear(const LinearArgs&, int64_t, int64_t);
void to_float_array(DType, const void*, float*, int64_t);
void delta_step(const DeltaStepArgs&, int64_t, int64_t);
void mhc_weights(const MhcWeightsArgs&, int64_t, int64_t);

extern const Kernels kTable;
const Kernels kTable = {
    VLLM_STRING(VLLM_ISA), rms_norm,           silu_and_mul, rotary,         write_kv,   copy_rows,
    decode_attention,      merge_decode_parts, linear,       to_float_array, delta_step, mhc_weights,
};

}  // namespace VLLM_ISA
}  // namespace vllm_native
