// Registers the CPU kernels as torch operators through libtorch's stable ABI: one library for every Python version and
// for later torch versions. The only file that knows torch. Shapes and types are checked here; the meaning of each op
// is stated beside its reference in vllm/_custom_ops.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "helpers.h"
#include "ops.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using namespace vllm_native;

DType dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      STD_TORCH_CHECK(false, "vllm_native: tensors must be float32, bfloat16 or float16");
  }
}

int64_t item_size(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
    case ScalarType::Int:
      return 4;
    case ScalarType::Double:
    case ScalarType::Long:
      return 8;
    case ScalarType::BFloat16:
    case ScalarType::Half:
    case ScalarType::Short:
      return 2;
    default:
      return 1;
  }
}

void check_dim(const Tensor& t, int64_t dim, const char* name) {
  STD_TORCH_CHECK(t.dim() == dim, "vllm_native: ", name, " must have ", dim, " dimensions, has ", t.dim());
}

void check_contiguous(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.is_contiguous(), "vllm_native: ", name, " must be contiguous");
}

template <typename T>
const T* read(const Tensor& t) {
  return static_cast<const T*>(t.data_ptr());
}

template <typename T>
T* write(Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}

// Runs kernel(args, begin, end) over [0, count) on torch's threads; `cost` is the rough work of an item in elements.
template <typename Args>
void run(void (*kernel)(const Args&, int64_t, int64_t), const Args& args, int64_t count, int64_t cost) {
  constexpr int64_t kWorthAThread = 16384;
  const int64_t grain = cost >= kWorthAThread ? 1 : kWorthAThread / (cost > 0 ? cost : 1);
  if (count <= grain) {
    kernel(args, 0, count);
    return;
  }
  torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

Tensor norm(const Tensor& x, Tensor* residual, const Tensor& weight, double eps) {
  const int64_t size = x.size(x.dim() - 1);
  check_contiguous(weight, "weight");
  STD_TORCH_CHECK(weight.numel() == size && weight.scalar_type() == x.scalar_type(),
                  "vllm_native: the norm's weight must fit x in size and type");
  Tensor out = torch::stable::empty_like(x);
  check_contiguous(out, "the norm's input");
  RmsNormArgs args{dtype_of(x), x.data_ptr(), nullptr, weight.data_ptr(), out.data_ptr(), size, size, float(eps)};
  if (residual != nullptr) {
    check_contiguous(*residual, "residual");
    STD_TORCH_CHECK(residual->numel() == x.numel() && residual->scalar_type() == x.scalar_type(),
                    "vllm_native: residual must fit x in size and type");
    args.residual = residual->data_ptr();
  }
  check_contiguous(x, "x");
  run(active_kernels().rms_norm, args, size ? x.numel() / size : 0, size);
  return out;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) { return norm(x, nullptr, weight, eps); }

Tensor add_rms_norm(const Tensor& x, Tensor residual, const Tensor& weight, double eps) {
  return norm(x, &residual, weight, eps);
}

Tensor silu_and_mul(const Tensor& gate_up, double limit) {
  check_contiguous(gate_up, "gate_up");
  const int64_t dims = gate_up.dim();
  std::vector<int64_t> shape;
  for (int64_t i = 0; i < dims; ++i) shape.push_back(gate_up.size(i));
  STD_TORCH_CHECK(shape.back() % 2 == 0, "vllm_native: gate_up needs an even last size, has ", shape.back());
  const int64_t size = shape.back() /= 2;
  Tensor out = torch::stable::new_empty(gate_up, shape);
  const SiluMulArgs args{dtype_of(gate_up), gate_up.data_ptr(), out.data_ptr(), size, limit > 0, float(limit)};
  run(active_kernels().silu_and_mul, args, size ? out.numel() / size : 0, 4 * size);
  return out;
}

void rotary(Tensor x, const Tensor& cos_sin, bool interleaved) {
  check_dim(x, 3, "x");
  check_dim(cos_sin, 2, "cos_sin");
  check_contiguous(cos_sin, "cos_sin");
  STD_TORCH_CHECK(cos_sin.scalar_type() == ScalarType::Float, "vllm_native: cos_sin must be float32");
  STD_TORCH_CHECK(cos_sin.size(0) == x.size(0) && cos_sin.size(1) <= x.size(2) && x.stride(2) == 1,
                  "vllm_native: cos_sin does not fit x");
  const RotaryArgs args{dtype_of(x),  x.data_ptr(), read<float>(cos_sin), x.size(1), x.stride(0),
                        x.stride(1), cos_sin.size(1), interleaved};
  run(active_kernels().rotary, args, x.size(0), x.size(1) * cos_sin.size(1));
}

void write_kv(Tensor pages, const Tensor& key, const Tensor& value, const Tensor& slots) {
  check_dim(pages, 4, "pages");
  check_dim(key, 3, "key");
  check_dim(value, 3, "value");
  check_contiguous(slots, "slots");
  STD_TORCH_CHECK(slots.scalar_type() == ScalarType::Long && slots.numel() == key.size(0),
                  "vllm_native: slots must be int64, one per token");
  STD_TORCH_CHECK(key.scalar_type() == pages.scalar_type() && value.scalar_type() == pages.scalar_type() &&
                      key.stride(2) == 1 && value.stride(2) == 1 && pages.stride(3) == 1 &&
                      pages.size(3) == key.size(2) + value.size(2) && pages.size(1) == key.size(1),
                  "vllm_native: key and value do not fit the pages");
  const int64_t bytes = item_size(pages);
  const WriteKvArgs args{bytes,
                         write<char>(pages),
                         read<char>(key),
                         read<char>(value),
                         read<int64_t>(slots),
                         key.size(1),
                         pages.size(2),
                         key.size(2),
                         value.size(2),
                         pages.stride(0) * bytes,
                         pages.stride(1) * bytes,
                         pages.stride(2) * bytes,
                         key.stride(0) * bytes,
                         key.stride(1) * bytes,
                         value.stride(0) * bytes,
                         value.stride(1) * bytes};
  run(active_kernels().write_kv, args, key.size(0), key.size(1) * pages.size(3));
}

// The rows in rising order. A job copies the same rows of one region after the other: they are sorted for the first one.
const std::vector<int64_t>& sorted_rows(const int64_t* rows, int64_t count) {
  static thread_local std::vector<int64_t> given, sorted;
  if (!std::equal(given.begin(), given.end(), rows, rows + count)) {
    given.clear();  // what it has is what was sorted, also where memory runs out
    sorted.assign(rows, rows + count);
    std::sort(sorted.begin(), sorted.end());
    given.assign(rows, rows + count);
  }
  return sorted;
}

// Every id is a row, none is written twice, and none is read that is written: rows are copied in any order, a few at once.
// The cost is that of the rows to copy, whatever the pool's size.
void check_rows(const CopyRowsArgs& a, const Tensor& target, const Tensor& source, int64_t count) {
  const int64_t targets = target.size(0), sources = source.size(0);
  STD_TORCH_CHECK(targets <= 1 || a.target_stride_bytes >= a.row_bytes, "vllm_native: target blocks overlap");
  for (int64_t i = 0; i < count; ++i) {
    const int64_t to = a.target_rows[i], from = a.source_rows[i];
    STD_TORCH_CHECK(to >= 0 && to < targets && from >= 0 && from < sources, "vllm_native: blocks ", from, " -> ", to,
                    " are outside ", sources, " -> ", targets);
  }
  const std::vector<int64_t>& written = sorted_rows(a.target_rows, count);
  const auto twice = std::adjacent_find(written.begin(), written.end());
  STD_TORCH_CHECK(twice == written.end(), "vllm_native: block ", *twice, " is a target twice");
  const int64_t stride = a.target_stride_bytes, apart = a.source - a.target;
  if (count == 0 || a.row_bytes == 0 || apart >= (targets - 1) * stride + a.row_bytes ||
      -apart >= (sources - 1) * a.source_stride_bytes + a.row_bytes) {
    return;  // nothing in common
  }
  STD_TORCH_CHECK(stride == a.source_stride_bytes && stride > 0, "vllm_native: source and target overlap");
  const int64_t shift = ((apart % stride) + stride) % stride;
  if (shift >= a.row_bytes && stride - shift >= a.row_bytes) return;  // other columns of the same rows
  STD_TORCH_CHECK(shift == 0, "vllm_native: source and target blocks overlap");
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = a.source_rows[i] + apart / stride;
    STD_TORCH_CHECK(!std::binary_search(written.begin(), written.end(), row), "vllm_native: block ", row,
                    " is both a source and a target");
  }
}

void copy_host_blocks(Tensor target, const Tensor& source, const Tensor& target_blocks, const Tensor& source_blocks,
                      int64_t threads) {
  check_dim(target, 2, "target");
  check_dim(source, 2, "source");
  check_contiguous(target_blocks, "target_blocks");
  check_contiguous(source_blocks, "source_blocks");
  STD_TORCH_CHECK(target_blocks.scalar_type() == ScalarType::Long && source_blocks.scalar_type() == ScalarType::Long &&
                      target_blocks.numel() == source_blocks.numel(),
                  "vllm_native: block ids must be int64, as many targets as sources");
  STD_TORCH_CHECK(target.scalar_type() == source.scalar_type() && target.size(1) == source.size(1) &&
                      (target.size(1) <= 1 || (target.stride(1) == 1 && source.stride(1) == 1)),
                  "vllm_native: source and target blocks must be alike");
  const int64_t bytes = item_size(target), count = target_blocks.numel();
  const CopyRowsArgs args{write<char>(target),          read<char>(source),       read<int64_t>(target_blocks),
                          read<int64_t>(source_blocks), target.size(1) * bytes,   target.stride(0) * bytes,
                          source.stride(0) * bytes};
  check_rows(args, target, source, count);
  // A thread takes little at a time, so that none is waited for long; a helper is called for enough to be worth it.
  constexpr int64_t kShareBytes = 1 << 20, kThreadBytes = 4 << 20;
  const int64_t share = args.row_bytes > 0 && args.row_bytes < kShareBytes ? kShareBytes / args.row_bytes : 1;
  const int64_t shares = (count + share - 1) / share, worth = count * args.row_bytes / kThreadBytes;
  std::atomic<int64_t> taken{0};
  const auto work = [&] {
    for (int64_t i; (i = taken.fetch_add(1)) < shares;) {
      const int64_t end = (i + 1) * share;
      active_kernels().copy_rows(args, i * share, end < count ? end : count);
    }
  };
  static thread_local Helpers helpers;
  helpers.run(std::min(threads, worth) - 1, work);
}

void paged_decode_attention(Tensor out, const Tensor& q, const Tensor& pages, const Tensor& table,
                            const Tensor& lengths, const Tensor& lows, int64_t length_max, double scale) {
  check_dim(q, 3, "q");
  check_dim(pages, 4, "pages");
  check_dim(table, 2, "table");
  check_contiguous(out, "out");
  STD_TORCH_CHECK(table.scalar_type() == ScalarType::Int && lengths.scalar_type() == ScalarType::Int &&
                      lows.scalar_type() == ScalarType::Int && table.stride(1) == 1,
                  "vllm_native: table, lengths and lows must be int32");
  STD_TORCH_CHECK(q.scalar_type() == pages.scalar_type() && out.scalar_type() == q.scalar_type() &&
                      q.stride(2) == 1 && pages.stride(3) == 1,
                  "vllm_native: q, pages and out must have one type");
  constexpr int64_t kSplit = 512;
  const int64_t rows = q.size(0), heads = q.size(1), key_dim = q.size(2), value_dim = pages.size(3) - key_dim;
  STD_TORCH_CHECK(key_dim <= 1024 && value_dim <= 1024 && heads % pages.size(1) == 0,
                  "vllm_native: head sizes up to 1024, query heads a multiple of KV heads");
  const int64_t parts = length_max > kSplit ? (length_max + kSplit - 1) / kSplit : 1;
  static thread_local std::vector<float> scratch;
  const size_t needed = size_t(decode_partial_floats(rows, heads, parts, value_dim));
  if (scratch.size() < needed) scratch.resize(needed);
  DecodeAttentionArgs args{};
  args.dtype = dtype_of(q);
  args.q = q.data_ptr();
  args.pages = pages.data_ptr();
  args.out = out.data_ptr();
  args.table = read<int32_t>(table);
  args.lengths = read<int32_t>(lengths);
  args.lows = read<int32_t>(lows);
  args.partial = scratch.data();
  args.rows = rows;
  args.q_heads = heads;
  args.kv_heads = pages.size(1);
  args.block_size = pages.size(2);
  args.key_dim = key_dim;
  args.value_dim = value_dim;
  args.q_row_stride = q.stride(0);
  args.q_head_stride = q.stride(1);
  args.table_stride = table.stride(0);
  args.block_stride = pages.stride(0);
  args.head_stride = pages.stride(1);
  args.token_stride = pages.stride(2);
  args.split = kSplit;
  args.parts_max = parts;
  args.scale = float(scale);
  const int64_t group = heads / args.kv_heads;
  const int64_t cost = (length_max < kSplit ? length_max : kSplit) * group * (key_dim + value_dim) / 4;
  run(active_kernels().decode_attention, args, rows * args.kv_heads * parts, cost);
  run(active_kernels().merge_decode_parts, args, rows * heads, value_dim * parts);
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  check_dim(x, 2, "x");
  check_dim(weight, 2, "weight");
  check_contiguous(x, "x");
  check_contiguous(weight, "weight");
  STD_TORCH_CHECK(x.size(1) == weight.size(1), "vllm_native: x has ", x.size(1), " channels, weight ", weight.size(1));
  const int64_t rows = x.size(0), inputs = x.size(1), outputs = weight.size(0);
  Tensor out = torch::stable::new_empty(x, {rows, outputs});
  LinearArgs args{};
  args.x_dtype = dtype_of(x);
  args.weight_dtype = dtype_of(weight);
  args.weight = weight.data_ptr();
  if (bias.has_value()) {
    check_contiguous(*bias, "bias");
    STD_TORCH_CHECK(bias->scalar_type() == x.scalar_type() && bias->numel() == outputs,
                    "vllm_native: bias must fit in size and type");
    args.bias = bias->data_ptr();
  }
  static thread_local std::vector<float> wide;
  if (args.x_dtype == DType::kFloat32) {
    args.x = read<float>(x);
  } else {
    if (wide.size() < size_t(x.numel())) wide.resize(size_t(x.numel()));
    active_kernels().to_float(args.x_dtype, x.data_ptr(), wide.data(), x.numel());
    args.x = wide.data();
  }
  args.out = out.data_ptr();
  args.rows = rows;
  args.inputs = inputs;
  args.outputs = outputs;
  if (rows > 0) {
    run(active_kernels().linear, args, (outputs + kLinearColumns - 1) / kLinearColumns, rows * inputs * kLinearColumns);
  }
  return out;
}

Tensor delta_rule_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
                       Tensor states, const Tensor& source, const Tensor& target) {
  check_dim(q, 3, "q");
  check_dim(states, 4, "states");
  check_contiguous(source, "source");
  check_contiguous(target, "target");
  const int64_t requests = q.size(0), heads = q.size(1), key_dim = q.size(2), value_dim = v.size(2);
  for (const Tensor* t : {&q, &k, &v, &g}) {
    check_dim(*t, 3, "q, k, v and g");
    STD_TORCH_CHECK(t->scalar_type() == ScalarType::Float && t->stride(2) == 1 && t->stride(1) == t->size(2) &&
                        t->size(0) == requests && t->size(1) == heads,
                    "vllm_native: q, k, v and g must be float32 [requests, heads, size] with packed heads");
  }
  STD_TORCH_CHECK(beta.scalar_type() == ScalarType::Float && beta.stride(1) == 1, "vllm_native: beta must be float32");
  STD_TORCH_CHECK(states.scalar_type() == ScalarType::Float && states.size(1) == heads && states.size(2) == key_dim &&
                      states.size(3) == value_dim && states.stride(3) == 1 && states.stride(2) == value_dim &&
                      states.stride(1) == key_dim * value_dim && key_dim <= 1024,
                  "vllm_native: states must be float32 [blocks, heads, key, value], packed within a block");
  STD_TORCH_CHECK(source.scalar_type() == ScalarType::Long && target.scalar_type() == ScalarType::Long &&
                      source.numel() == requests && target.numel() == requests,
                  "vllm_native: source and target must be int64, one per request");
  Tensor out = torch::stable::new_empty(q, {requests, heads, value_dim});
  const DeltaStepArgs args{read<float>(q),       read<float>(k),        read<float>(v),        read<float>(g),
                           read<float>(beta),    write<float>(states),  read<int64_t>(source), read<int64_t>(target),
                           write<float>(out),    heads,                 key_dim,               value_dim,
                           states.stride(0),     q.stride(0),           k.stride(0),           v.stride(0),
                           g.stride(0),          beta.stride(0)};
  run(active_kernels().delta_step, args, requests * heads, 4 * key_dim * value_dim);
  return out;
}

std::tuple<Tensor, Tensor, Tensor> mhc_weights(const Tensor& mixed, const Tensor& scale, const Tensor& base, double eps,
                                               int64_t iterations) {
  check_dim(mixed, 2, "mixed");
  for (const Tensor* t : {&mixed, &scale, &base}) {
    check_contiguous(*t, "mixed, scale and base");
    STD_TORCH_CHECK(t->scalar_type() == ScalarType::Float, "vllm_native: mixed, scale and base must be float32");
  }
  int64_t n = 1;
  while ((2 + n) * n < mixed.size(1)) ++n;
  STD_TORCH_CHECK((2 + n) * n == mixed.size(1) && base.numel() == mixed.size(1) && scale.numel() == 3 &&
                      n <= kMhcStreamsMax,
                  "vllm_native: mixed must have (2 + n) * n columns, has ", mixed.size(1));
  const int64_t tokens = mixed.size(0);
  Tensor pre = torch::stable::new_empty(mixed, {tokens, n});
  Tensor post = torch::stable::new_empty(mixed, {tokens, n});
  Tensor comb = torch::stable::new_empty(mixed, {tokens, n, n});
  const MhcWeightsArgs args{read<float>(mixed), read<float>(scale), read<float>(base), write<float>(pre),
                            write<float>(post), write<float>(comb), n,                 iterations,
                            float(eps)};
  run(active_kernels().mhc_weights, args, tokens, 4 * n * n * iterations);
  return {pre, post, comb};
}

bool set_cpu_isa(std::string name) { return select_isa(name.c_str()); }

std::string get_cpu_isa() { return active_kernels().isa; }

}  // namespace

STABLE_TORCH_LIBRARY(vllm_native, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("add_rms_norm(Tensor x, Tensor(a!) residual, Tensor weight, float eps) -> Tensor");
  m.def("silu_and_mul(Tensor gate_up, float limit) -> Tensor");
  m.def("rotary(Tensor(a!) x, Tensor cos_sin, bool interleaved) -> ()");
  m.def("write_kv(Tensor(a!) pages, Tensor key, Tensor value, Tensor slots) -> ()");
  m.def("copy_blocks(Tensor(a!) target, Tensor source, Tensor target_blocks, Tensor source_blocks) -> ()");  // CUDA's
  m.def(
      "copy_host_blocks(Tensor(a!) target, Tensor source, Tensor target_blocks, Tensor source_blocks, int threads)"
      " -> ()");
  m.def(
      "paged_decode_attention(Tensor(a!) out, Tensor q, Tensor pages, Tensor table, Tensor lengths, Tensor lows,"
      " int length_max, float scale) -> ()");
  m.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def(
      "delta_rule_step(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) states, Tensor source,"
      " Tensor target) -> Tensor");
  m.def(
      "mhc_weights(Tensor mixed, Tensor scale, Tensor base, float eps, int iterations) -> (Tensor, Tensor, Tensor)");
  m.def("set_cpu_isa(str name) -> bool");
  m.def("get_cpu_isa() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_native, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  m.impl("silu_and_mul", TORCH_BOX(&silu_and_mul));
  m.impl("rotary", TORCH_BOX(&rotary));
  m.impl("write_kv", TORCH_BOX(&write_kv));
  m.impl("copy_host_blocks", TORCH_BOX(&copy_host_blocks));
  m.impl("paged_decode_attention", TORCH_BOX(&paged_decode_attention));
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("delta_rule_step", TORCH_BOX(&delta_rule_step));
  m.impl("mhc_weights", TORCH_BOX(&mhc_weights));
}

STABLE_TORCH_LIBRARY_IMPL(vllm_native, CompositeExplicitAutograd, m) {
  m.impl("set_cpu_isa", TORCH_BOX(&set_cpu_isa));
  m.impl("get_cpu_isa", TORCH_BOX(&get_cpu_isa));
}
