# One place for how a package's private extension module is built.
#
#   lamella_pybind_module(<package> SOURCES a.cpp b.cpp)
#
# makes the module lamella.<package>._C. pybind11 comes from the build environment, so nothing is needed from the system
# but a C++17 compiler. csrc/bind/module.cpp must be among the sources: it publishes LAMELLA_BUILD_ID as `build_id`.
#
# The build id is a hash over everything that goes into the module, so that a stale one can be told. tools/native.py
# computes the same: the SHA-256 of the lines "<label> <sha256 of the file>\n", sorted by label, first 16 digits, over
#
#   CMakeLists.txt   the package's own
#   csrc/**          *.cpp *.cc *.c *.hpp *.h *.inc
#   cmake/*.cmake    shared, wherever they lie (repository or sdist)
#   abi/**           likewise, for packages that set LAMELLA_NATIVE_DIR
find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)
find_package(pybind11 CONFIG REQUIRED)

function(lamella_pybind_module package)
  cmake_parse_arguments(ARG "" "" "SOURCES" ${ARGN})
  pybind11_add_module(_C MODULE ${ARG_SOURCES})
  lamella_build_id(digest)
  # On one file only: a changed id must not compile every source again.
  set_source_files_properties(csrc/bind/module.cpp PROPERTIES COMPILE_DEFINITIONS LAMELLA_BUILD_ID="${digest}")
  target_compile_features(_C PRIVATE cxx_std_17)
  lamella_warnings(_C)
  install(TARGETS _C DESTINATION lamella/${package})
endfunction()

function(lamella_build_id result)
  set(lines "")
  set(files "")
  _lamella_label(GLOB "" "${CMAKE_CURRENT_SOURCE_DIR}" "CMakeLists.txt")
  _lamella_label(GLOB "cmake/" "${LAMELLA_CMAKE_DIR}" "*.cmake")
  foreach(ending IN ITEMS cpp cc c hpp h inc)
    _lamella_label(GLOB_RECURSE "" "${CMAKE_CURRENT_SOURCE_DIR}" "csrc/*.${ending}")
    if(DEFINED LAMELLA_NATIVE_DIR)
      _lamella_label(GLOB_RECURSE "abi/" "${LAMELLA_NATIVE_DIR}/abi" "*.${ending}")
    endif()
  endforeach()
  list(SORT lines)
  list(JOIN lines "" text)
  string(SHA256 digest "${text}")
  string(SUBSTRING "${digest}" 0 16 digest)
  # A changed file makes a plain `cmake --build` configure again and take the new id.
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${files})
  set(${result} "${digest}" PARENT_SCOPE)
endfunction()

# Adds one line per file under `folder` that matches to the caller's `lines`, and its path to `files`.
macro(_lamella_label mode prefix folder pattern)
  file(${mode} _found RELATIVE "${folder}" CONFIGURE_DEPENDS "${folder}/${pattern}")
  foreach(_name IN LISTS _found)
    file(SHA256 "${folder}/${_name}" _digest)
    list(APPEND lines "${prefix}${_name} ${_digest}\n")
    list(APPEND files "${folder}/${_name}")
  endforeach()
endmacro()
