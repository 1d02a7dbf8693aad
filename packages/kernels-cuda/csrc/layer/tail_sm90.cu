#include "layer/tail_sm90.cuh"

namespace lamella {

int layer_tail_sm90(const LamellaLayerTail& p, void* workspace, int64_t zeroed, void* stream) {
  switch (static_cast<Elem>(p.elem)) {
    case Elem::bf16:
      return layer_tail<bf16>(p, workspace, zeroed, stream);
    case Elem::f16:
      return layer_tail<f16>(p, workspace, zeroed, stream);
    default:
      return kUnsupported;
  }
}

}  // namespace lamella
