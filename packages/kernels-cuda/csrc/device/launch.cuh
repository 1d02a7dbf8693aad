// How kernels are launched: with programmatic dependent launch where the device has it, so that a kernel's first part
// (index arithmetic, weights) runs while its predecessor on the stream drains.
//
//   in the kernel:   wait_predecessor();   before the first read of anything that the predecessor wrote
//                    launch_successor();   when what is left no longer matters to the successor's first part
//
// Every kernel launched by launch() must call wait_predecessor() in every thread that touches global memory written by
// other kernels: memory safety rests on that, also for outputs (the predecessor may still read them).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/status.h"

namespace lamella {

__device__ __forceinline__ void wait_predecessor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void launch_successor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

struct DeviceFacts {
  int capability = 0;  // 90 for Hopper; 0: unknown
  int num_sms = 0;
  int max_shared = 0;  // bytes a block may opt in to
};

// Of the current device; asked of the driver once per device.
inline const DeviceFacts& device_facts() {
  constexpr int kMaxDevices = 64;
  static DeviceFacts facts[kMaxDevices];
  static const DeviceFacts none;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMaxDevices) return none;
  DeviceFacts& found = facts[device];
  if (found.capability == 0) {
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    cudaDeviceGetAttribute(&found.num_sms, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceGetAttribute(&found.max_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    found.capability = major * 10 + minor;
  }
  return found;
}

struct Launch {
  dim3 grid;
  dim3 block;
  size_t shared = 0;  // dynamic, bytes
  cudaStream_t stream = nullptr;
  bool overlap = true;  // programmatic dependent launch on devices of capability >= 9.0
  unsigned cluster = 1;  // blocks per cluster along x
};

template <class... Params, class... Args>
int launch(void (*kernel)(Params...), const Launch& how, Args... args) {
  if (how.grid.x == 0 || how.grid.y == 0 || how.grid.z == 0) return kOk;
  cudaLaunchConfig_t config = {};
  config.gridDim = how.grid;
  config.blockDim = how.block;
  config.dynamicSmemBytes = how.shared;
  config.stream = how.stream;
  cudaLaunchAttribute attributes[2];
  int count = 0;
  if (how.overlap && device_facts().capability >= 90) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count].val.programmaticStreamSerializationAllowed = 1;
    ++count;
  }
  if (how.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = how.cluster;
    attributes[count].val.clusterDim.y = 1;
    attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  config.attrs = attributes;
  config.numAttrs = count;
  // what a block has without asking is 48 KB, static arrays included
  if (how.shared > 32 * 1024) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(how.shared));
    if (error != cudaSuccess) {
      cudaGetLastError();
      return error;
    }
  }
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

}  // namespace lamella
