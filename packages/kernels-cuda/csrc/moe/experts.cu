#include "moe/experts.h"

#include <algorithm>

#include "moe/align.h"
#include "moe/combine.cuh"
#include "moe/gemm_portable.h"
#include "moe/gemm_sm90.h"
#include "moe/route.h"

namespace lamella {

// An expert's rows scatter about their mean: a block has room for twice its root more. A token meets an expert once, so
// that no more rows than tokens are needed.
//
//   rows per expert     block   kernel
//     0 ..   4              8   gemm_sm90.cuh, weights once through one consumer warpgroup, units dealt evenly
//     5 ..   9             16   same
//    10 ..  22             32   same
//    23 ..  49             64   same; fp8: the widest, two warpgroups, whole tiles
//    50 ..  78             96   same
//    79 .. 107            128   same
//   108 ..                320   wide_sm90.cuh: two thread blocks share the weights
int moe_sm90_rows(int64_t num_tokens, int64_t rows_per_expert, bool fp8) {
  for (const int rows : {8, 16, 32, 64, 96, 128}) {
    const int64_t spare = rows - rows_per_expert;
    if (num_tokens <= rows || (spare >= 0 && spare * spare >= 4 * rows_per_expert) || (fp8 && rows == 64)) return rows;
  }
  return kMoeWideRows;
}

int64_t moe_sm90_partials(int block_rows) {
  return block_rows == kMoeWideRows ? 0 : int64_t{block_rows} * 128 * 4 * device_facts().num_sms;
}

namespace {

constexpr int64_t kFlagBytes = 4096;

// Where things lie in the workspace, in bytes.
struct MoeLayout {
  bool hopper, direct;
  int block_rows;
  int64_t max_blocks, places;  // rows of h
  int64_t partials, sorted_ids, block_experts, block_sizes, num_rows, h, y, x_q, x_scale, h_q, h_scale, total;

  MoeLayout(int64_t tokens, int64_t top_k, int64_t experts, int64_t map_size, int64_t hidden, int64_t inner, bool fp8,
            bool portable) {
    // with a map, part of the pairs are other devices'
    const int64_t pairs = tokens * top_k, spread = std::max<int64_t>({experts, map_size, 1});
    const int64_t mean = (pairs + spread - 1) / spread;
    hopper = !portable && device_facts().capability == 90;
    block_rows = hopper ? moe_sm90_rows(tokens, mean, fp8) : moe_portable_rows(mean);
    direct = hopper && tokens <= kMaxDirectTokens && pairs <= kMaxDirect;
    max_blocks = direct ? pairs : lamella_moe_max_blocks(pairs, experts, block_rows);
    places = max_blocks * block_rows;
    total = kFlagBytes;
    const auto take = [&](int64_t bytes) {
      const int64_t at = total;
      total += (bytes + 255) / 256 * 256;
      return at;
    };
    partials = take(hopper ? moe_sm90_partials(block_rows) : 0);
    sorted_ids = take(direct ? 0 : places * 4);
    block_experts = take(direct ? 0 : max_blocks * 4);
    block_sizes = take(direct ? 0 : max_blocks * 4);
    num_rows = take(4);
    h = take(places * inner * 2);
    y = take(pairs * hidden * 2);
    x_q = take(fp8 ? tokens * hidden : 0);
    x_scale = take(fp8 ? tokens * (hidden / 128) * 4 : 0);
    h_q = take(fp8 ? places * inner : 0);
    h_scale = take(fp8 ? places * (inner / 128) * 4 : 0);
  }
};

template <class T>
int quantise(void* q, float* scales, const void* x, int64_t x_stride, int64_t rows, int64_t width,
             const int32_t* num_rows, void* stream) {
  const int64_t items = rows * (width / 128), blocks = (items + 3) / 4;
  if (blocks > INT32_MAX) return kUnsupported;
  const Launch how{dim3(static_cast<unsigned>(blocks)), dim3(128), 0, static_cast<cudaStream_t>(stream)};
  return launch(moe_quantise_kernel<T>, how, static_cast<f8*>(q), scales, static_cast<const T*>(x), x_stride,
                width / 128, rows, num_rows);
}

int product(const MoeGemm& g, bool first, const MoeLayout& at, const LamellaMoe& m, void* stream) {
  if (!at.hopper) return moe_gemm_portable(g, first, at.block_rows, at.max_blocks, m.weight_elem, m.elem, stream);
  const bool wide = at.block_rows == kMoeWideRows;
  switch (static_cast<Elem>(m.weight_elem)) {
    case Elem::bf16:
      if (wide) return moe_wide_sm90_bf16(g, first, at.places, stream);
      return moe_gemm_sm90_bf16(g, first, at.block_rows, at.places, stream);
    case Elem::f16:
      if (wide) return moe_wide_sm90_f16(g, first, at.places, stream);
      return moe_gemm_sm90_f16(g, first, at.block_rows, at.places, stream);
    default:
      return moe_gemm_sm90_f8(g, first, at.block_rows, at.places, m.elem, stream);
  }
}

template <class T>
int add_residual(const CombineParams& sum, int64_t num_tokens, void* stream) {
  const Launch how{dim3(static_cast<unsigned>(num_tokens)), dim3(kCombineNormThreads), 0,
                   static_cast<cudaStream_t>(stream)};
  const int64_t vecs = (sum.hidden / Vec<T>::kSize + kCombineNormThreads - 1) / kCombineNormThreads;
  if (vecs <= 1) return launch(moe_combine_norm_kernel<T, 1>, how, sum);
  if (vecs <= 2) return launch(moe_combine_norm_kernel<T, 2>, how, sum);
  if (vecs <= kCombineNormVecs) return launch(moe_combine_norm_kernel<T, kCombineNormVecs>, how, sum);
  return kUnsupported;
}

template <class T>
int run(const LamellaMoe& m, char* work, int64_t work_bytes, void* stream) {
  const bool fp8 = static_cast<Elem>(m.weight_elem) == Elem::f8e4m3;
  if (!fp8 && m.weight_elem != m.elem) return kUnsupported;
  const int64_t multiple = fp8 ? 128 : 8;
  if (m.hidden % multiple != 0 || m.inner % multiple != 0 || m.num_experts < 1 || m.num_experts > 1024 ||
      m.num_tokens * m.top_k > INT32_MAX / 2 || m.hidden > INT32_MAX || m.inner > INT32_MAX / 2)
    return kUnsupported;
  const MoeLayout at(m.num_tokens, m.top_k, m.num_experts, m.expert_map != nullptr ? m.map_size : 0, m.hidden, m.inner,
                     fp8, m.portable != 0);
  if (work_bytes < at.total) return kUnsupported;
  const auto ints = [&](int64_t offset) { return reinterpret_cast<int32_t*>(work + offset); };
  const auto floats = [&](int64_t offset) { return reinterpret_cast<float*>(work + offset); };

  RouteParams route = {};
  if (m.logits != nullptr) {
    const int64_t choices = m.expert_map != nullptr ? m.map_size : m.num_experts;
    if (at.direct && m.expert_map == nullptr && choices <= kMaxDirectRoute && m.top_k <= 32 && m.top_k <= choices) {
      route = RouteParams{m.ids,
                          m.weights,
                          m.logits,
                          nullptr,
                          m.num_tokens,
                          m.logits_stride,
                          static_cast<int>(choices),
                          m.top_k,
                          kScoreSoftmax,
                          1,
                          1,
                          m.logits_elem,
                          m.renormalize != 0,
                          1.f};
    } else if (const int status =
                   lamella_moe_route(m.ids, m.weights, m.logits, nullptr, m.num_tokens, choices, m.logits_stride,
                                     m.top_k, kScoreSoftmax, m.renormalize, 1, 1, 1.f, m.logits_elem, stream)) {
      return status;
    }
  }
  const void* x = m.x;
  int64_t x_stride = m.x_stride;
  if (fp8) {
    if (const int status = quantise<T>(work + at.x_q, floats(at.x_scale), m.x, m.x_stride, m.num_tokens, m.hidden,
                                       nullptr, stream))
      return status;
    x = work + at.x_q;
    x_stride = m.hidden;
  }
  if (!at.direct) {
    if (const int status = lamella_moe_align(ints(at.sorted_ids), ints(at.block_experts), ints(at.block_sizes),
                                             ints(at.num_rows), m.ids, m.expert_map, m.num_tokens * m.top_k,
                                             m.map_size, m.num_experts, at.block_rows, 0,
                                             at.block_rows == kMoeWideRows, stream))
      return status;
  }
  const int64_t unit = fp8 ? 128 : 64;
  MoeGemm g = {};
  g.blocks = MoeBlocks{m.ids,
                       m.expert_map,
                       m.map_size,
                       ints(at.sorted_ids),
                       ints(at.block_experts),
                       ints(at.block_sizes),
                       at.direct ? nullptr : ints(at.num_rows),
                       static_cast<int>(m.num_tokens * m.top_k),
                       static_cast<int>(m.num_experts),
                       m.top_k,
                       route};
  g.partials = floats(at.partials);
  g.flags = reinterpret_cast<unsigned*>(work);

  g.x = x;
  g.x_scale = floats(at.x_scale);
  g.x_stride = x_stride;
  g.w = m.w13;
  g.w_scale = m.w13_scale;
  g.out = work + at.h;
  g.k = m.hidden;
  g.rows = 2 * m.inner;
  g.num_out = static_cast<int>(m.inner);
  g.num_k = static_cast<int>((m.hidden + unit - 1) / unit);
  if (const int status = product(g, true, at, m, stream)) return status;

  g.x = work + at.h;
  if (fp8) {
    if (const int status = quantise<T>(work + at.h_q, floats(at.h_scale), work + at.h, m.inner, at.places, m.inner,
                                       g.blocks.num_rows, stream))
      return status;
    g.x = work + at.h_q;
  }
  g.x_scale = floats(at.h_scale);
  g.x_stride = m.inner;
  g.w = m.w2;
  g.w_scale = m.w2_scale;
  g.out = work + at.y;
  g.k = m.inner;
  g.rows = m.hidden;
  g.num_out = static_cast<int>(m.hidden);
  g.num_k = static_cast<int>((m.inner + unit - 1) / unit);
  if (const int status = product(g, false, at, m, stream)) return status;

  const CombineParams sum{m.out,
                          work + at.y,
                          m.ids,
                          m.expert_map,
                          m.weights,
                          m.map_size,
                          m.hidden,
                          m.out_stride,
                          static_cast<int>(m.num_experts),
                          m.top_k,
                          m.residual,
                          m.normed,
                          m.next_norm,
                          m.residual_stride,
                          m.normed_stride,
                          m.eps};
  if (m.residual != nullptr) return add_residual<T>(sum, m.num_tokens, stream);
  const int64_t columns = kCombineThreads * Vec<T>::kSize;
  const Launch how{dim3(static_cast<unsigned>(m.num_tokens), static_cast<unsigned>((m.hidden + columns - 1) / columns)),
                   dim3(kCombineThreads), 0, static_cast<cudaStream_t>(stream)};
  return launch(moe_combine_kernel<T>, how, sum);
}

}  // namespace
}  // namespace lamella

LAMELLA_API int64_t lamella_moe_workspace(int64_t num_tokens, int64_t top_k, int64_t num_experts, int64_t map_size,
                                          int64_t hidden, int64_t inner, int fp8, int portable) {
  return lamella::MoeLayout(num_tokens, top_k, num_experts, map_size, hidden, inner, fp8 != 0, portable != 0).total;
}

LAMELLA_API int64_t lamella_moe_workspace_up_to(int64_t num_tokens, int64_t top_k, int64_t num_experts,
                                                int64_t map_size, int64_t hidden, int64_t inner, int fp8,
                                                int portable) {
  int64_t most = 0;
  for (int64_t tokens = 0; tokens <= num_tokens; ++tokens)
    most = std::max(most, lamella_moe_workspace(tokens, top_k, num_experts, map_size, hidden, inner, fp8, portable));
  return most;
}

LAMELLA_API int64_t lamella_moe_residual_width(void) {
  return lamella::kCombineNormThreads * lamella::kCombineNormVecs * lamella::Vec<lamella::bf16>::kSize;
}

LAMELLA_API int64_t lamella_moe_zeroed(void) { return lamella::kFlagBytes; }

LAMELLA_API int lamella_moe(const LamellaMoe* moe, void* workspace, int64_t workspace_bytes, void* stream) {
  if (moe->num_tokens == 0 || moe->hidden == 0) return kOk;
  char* work = static_cast<char*>(workspace);
  switch (static_cast<lamella::Elem>(moe->elem)) {
    case lamella::Elem::bf16:
      return lamella::run<lamella::bf16>(*moe, work, workspace_bytes, stream);
    case lamella::Elem::f16:
      return lamella::run<lamella::f16>(*moe, work, workspace_bytes, stream);
    default:
      return kUnsupported;
  }
}
