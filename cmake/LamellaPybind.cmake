# One place for how a package's private extension module is built.
#
#   lamella_pybind_module(<package> SOURCES a.cpp b.cpp)
#
# makes the module lamella.<package>._C. pybind11 comes from the build environment, so nothing is needed from the system
# but a C++17 compiler. The build id (a hash over the sources) is compiled in, so that a stale module can be told.
find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)
find_package(pybind11 CONFIG REQUIRED)

function(lamella_pybind_module package)
  cmake_parse_arguments(ARG "" "" "SOURCES" ${ARGN})
  pybind11_add_module(_C MODULE ${ARG_SOURCES})
  set(digest "")
  file(GLOB_RECURSE all CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/csrc/*")
  list(SORT all)
  foreach(source IN LISTS all)
    file(SHA256 "${source}" one)
    string(APPEND digest "${one}")
  endforeach()
  string(SHA256 digest "${digest}")
  string(SUBSTRING "${digest}" 0 16 digest)
  target_compile_definitions(_C PRIVATE LAMELLA_BUILD_ID="${digest}")
  target_compile_features(_C PRIVATE cxx_std_17)
  lamella_warnings(_C)
  install(TARGETS _C DESTINATION lamella/${package})
endfunction()
