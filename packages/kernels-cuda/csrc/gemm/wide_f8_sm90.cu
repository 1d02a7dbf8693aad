#include "gemm/wide_f8_sm90.cuh"

#include "gemm/wide_f8_sm90.h"

namespace lamella {
namespace {

template <int kSets>
int64_t pairs_of_tiles(const LamellaGemm& g) {
  constexpr int64_t kRows = WideF8Shape<kSets>::kRows, kColumns = 2 * kWideF8Columns;
  return (g.m + kRows - 1) / kRows * ((g.n + kColumns - 1) / kColumns);
}

template <int kSets, bool kBlocks>
int launch_wide(const LamellaGemm& g, void* stream) {
  using Shape = WideF8Shape<kSets>;
  // coordinates are 32-bit
  if (g.m > INT32_MAX - 256 || g.n > INT32_MAX - 256 || g.k > INT32_MAX - 128) return kUnsupported;
  const int64_t tiles = pairs_of_tiles<kSets>(g), at_once = device_facts().num_sms / 2;
  if (tiles > INT32_MAX - at_once) return kUnsupported;
  WideF8Plan plan;
  plan.num_m = static_cast<int>((g.m + Shape::kRows - 1) / Shape::kRows);
  plan.num_n = static_cast<int>((g.n + 2 * kWideF8Columns - 1) / (2 * kWideF8Columns));
  plan.num_k = static_cast<int>((g.k + 127) / 128);
  constexpr CUtensorMapDataType kType = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  if (!map_rows(&plan.x, kType, 1, g.x, g.m, g.k, g.x_stride, Shape::kRows / 2) ||
      !map_rows(&plan.w, kType, 1, g.w, g.n, g.k, g.w_stride, kWideF8Columns))
    return kUnsupported;
  const Launch how{dim3(static_cast<unsigned>(2 * (tiles < at_once ? tiles : at_once))), dim3(Shape::kThreads),
                   Shape::kShared, static_cast<cudaStream_t>(stream), true, 2};
  return launch(wide_f8_kernel<kSets, kBlocks>, how, plan, g);
}

template <bool kBlocks>
int by_rows(const LamellaGemm& g, void* stream) {
  // Rounds of all multiprocessors, in the time of one set: what two sets save is worth a tenth.
  const int64_t at_once = device_facts().num_sms / 2;
  const int64_t one = (pairs_of_tiles<1>(g) + at_once - 1) / at_once;
  const int64_t two = (pairs_of_tiles<2>(g) + at_once - 1) / at_once * 2;
  return 10 * two <= 11 * one ? launch_wide<2, kBlocks>(g, stream) : launch_wide<1, kBlocks>(g, stream);
}

}  // namespace

int wide_f8_sm90(const LamellaGemm& g, void* stream) {
  return g.scale_block != 0 ? by_rows<true>(g, stream) : by_rows<false>(g, stream);
}

}  // namespace lamella
