# How the CUDA library is built: one shared library with a C interface, without torch or Python in it, and with the CUDA
# runtime linked in, so that it loads on a machine without a driver.
#
#   LAMELLA_CUDA_ARCHS   list of 80, 90a, 100a
#   CMAKE_CUDA_COMPILER  default: the nvcc of the package nvidia-cuda-nvcc in the build environment, else the one on PATH
if(NOT CMAKE_CUDA_COMPILER)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
            "import pathlib, sys; print(next((str(p) for d in sys.path if d for p in pathlib.Path(d).glob('nvidia/cu1*/bin/nvcc')), ''))"
    OUTPUT_VARIABLE _nvcc OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(_nvcc)
    set(CMAKE_CUDA_COMPILER "${_nvcc}" CACHE FILEPATH "nvcc")
  endif()
endif()
if(CMAKE_CUDA_COMPILER MATCHES "/nvidia/cu1[0-9]+/bin/nvcc$")
  # the wheels have lib, the compiler asks for lib64
  get_filename_component(_root "${CMAKE_CUDA_COMPILER}/../.." REALPATH)
  set(CMAKE_CUDA_FLAGS "${CMAKE_CUDA_FLAGS} -L${_root}/lib")
endif()
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
set(CMAKE_CUDA_ARCHITECTURES OFF)
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
enable_language(CUDA)

function(_lamella_gencode result)
  set(flags "")
  foreach(arch IN LISTS ARGN)
    list(APPEND flags "SHELL:-gencode=arch=compute_${arch},code=sm_${arch}")
  endforeach()
  set(${result} "${flags}" PARENT_SCOPE)
endfunction()

function(lamella_cuda_library name)
  cmake_parse_arguments(ARG "" "" "FAMILIES" ${ARGN})
  add_library(${name} SHARED)
  foreach(family IN LISTS ARG_FAMILIES)
    file(GLOB sources CONFIGURE_DEPENDS csrc/${family}/*.cu)
    set(hopper ${sources})
    list(FILTER hopper INCLUDE REGEX "_sm90\\.cu$")
    list(FILTER sources EXCLUDE REGEX "_sm90\\.cu$")
    if(NOT "90a" IN_LIST LAMELLA_CUDA_ARCHS)
      set(hopper "")
    endif()
    _lamella_objects(${name} ${family} "${LAMELLA_CUDA_ARCHS}" ${sources})
    _lamella_objects(${name} ${family}_sm90 "90a" ${hopper})
  endforeach()
  if(NOT "90a" IN_LIST LAMELLA_CUDA_ARCHS)
    message(FATAL_ERROR "LAMELLA_CUDA_ARCHS must hold 90a: the dispatch names its kernels")
  endif()
  set_target_properties(${name} PROPERTIES CXX_VISIBILITY_PRESET hidden LINKER_LANGUAGE CUDA)
  # what is linked in must not be seen from outside: else exceptions of other libraries go through our copy of the
  # unwinder, which ends the process
  target_link_options(${name} PRIVATE -static-libstdc++ -static-libgcc -Wl,--exclude-libs,ALL)
endfunction()

function(_lamella_objects library object archs)
  if(NOT ARGN)
    return()
  endif()
  add_library(${object} OBJECT ${ARGN})
  _lamella_gencode(flags ${archs})
  target_compile_options(${object} PRIVATE ${flags} -O3 --expt-relaxed-constexpr --threads=2 -Xptxas=-warn-spills
                         -Xcompiler=-fvisibility=hidden --extended-lambda)
  target_include_directories(${object} PRIVATE csrc)
  set_target_properties(${object} PROPERTIES POSITION_INDEPENDENT_CODE ON CUDA_VISIBILITY_PRESET hidden)
  target_sources(${library} PRIVATE $<TARGET_OBJECTS:${object}>)
endfunction()
