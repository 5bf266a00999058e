# dataparallel_find_torch(<problem>) finds LibTorch: the imported target `torch`
# and the variable Torch_VERSION. Where it cannot, <problem> is one sentence
# that says why and what to do; otherwise it is empty.
#
# Looked at, in this order: Torch_DIR and CMAKE_PREFIX_PATH, an installation
# beside this file's own (a wheel in the same environment), and the environment
# of DATAPARALLEL_PYTHON.
#
# The package file of a CUDA build of torch asks for a CUDA toolkit, enables the
# CUDA language and puts the toolkit's libraries, whatever their version, before
# those that torch was built with. Nothing here needs that: libtorch finds its
# own CUDA and NCCL libraries through its RPATH. torch does it only where
# there is no target torch::cudart yet, so an empty one makes all builds of
# torch alike: with CUDA or without, with a toolkit on the machine or without.
# A project with CUDA code of its own calls find_package(Torch) first; then
# this leaves everything as it is.

find_program(
  DATAPARALLEL_PYTHON
  NAMES python3 python
  HINTS ${CMAKE_CURRENT_LIST_DIR}/../.venv ENV VIRTUAL_ENV
  PATH_SUFFIXES bin
  DOC "The Python interpreter whose torch is used"
)
set(DATAPARALLEL_WHEEL_TORCH ${CMAKE_CURRENT_LIST_DIR}/../../../../torch)

function(dataparallel_find_torch problem)
  set(${problem} "" PARENT_SCOPE)
  if(NOT Torch_DIR)
    find_path(
      found_dir
      NAMES TorchConfig.cmake
      HINTS ${DATAPARALLEL_WHEEL_TORCH}
      PATH_SUFFIXES Torch share/cmake/Torch
      NO_CACHE
    )
    if(NOT found_dir AND DATAPARALLEL_PYTHON)
      execute_process(
        COMMAND
          ${DATAPARALLEL_PYTHON} -c
          "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
        OUTPUT_VARIABLE package_dir
        OUTPUT_STRIP_TRAILING_WHITESPACE
        ERROR_QUIET
      )
      if(EXISTS "${package_dir}/share/cmake/Torch/TorchConfig.cmake")
        set(found_dir ${package_dir}/share/cmake/Torch)
      endif()
    endif()
    if(NOT found_dir)
      set(
        ${problem}
        "LibTorch was not found: pass -DDATAPARALLEL_PYTHON=<an interpreter that has torch installed> or -DCMAKE_PREFIX_PATH=<the folder of an unpacked libtorch>."
        PARENT_SCOPE
      )
      return()
    endif()
    set(Torch_DIR ${found_dir} CACHE PATH "The folder of TorchConfig.cmake")
  endif()

  # Global, so that a project which adds this one as a subdirectory can link.
  set(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL TRUE)
  if(NOT TARGET torch::cudart)
    add_library(torch::cudart INTERFACE IMPORTED GLOBAL)
  endif()
  # torch warns about a static library (kineto) that no wheel has.
  set(CMAKE_MESSAGE_LOG_LEVEL ERROR)
  find_package(Torch CONFIG QUIET)
  if(NOT Torch_FOUND OR NOT TARGET torch)
    set(
      ${problem}
      "LibTorch in ${Torch_DIR} could not be used: install it anew, or name another with -DTorch_DIR=<the folder of TorchConfig.cmake>."
      PARENT_SCOPE
    )
    return()
  endif()
  set(Torch_VERSION ${Torch_VERSION} PARENT_SCOPE)
endfunction()

# dataparallel_torch_has_cuda(<result>), of the torch that was found.
function(dataparallel_torch_has_cuda result)
  get_target_property(libraries torch INTERFACE_LINK_LIBRARIES)
  if("${libraries}" MATCHES "torch_cuda")
    set(${result} TRUE PARENT_SCOPE)
  else()
    set(${result} FALSE PARENT_SCOPE)
  endif()
endfunction()

# Of a torch with CUDA: DATAPARALLEL_CUDA_INCLUDE_DIR, the CUDA headers that
# torch's own include, from the wheels that torch came with or from a toolkit.
# Without them the library is built without NCCL.
function(dataparallel_find_cuda_headers)
  dataparallel_torch_has_cuda(has_cuda)
  if(NOT has_cuda)
    return()
  endif()
  file(GLOB beside_torch ${Torch_DIR}/../../../../nvidia/cu*/include)
  find_path(
    DATAPARALLEL_CUDA_INCLUDE_DIR
    NAMES cusparse.h
    HINTS ${beside_torch} ENV CUDA_HOME
    PATHS /usr/local/cuda
    PATH_SUFFIXES include
    DOC "The folder of the CUDA headers"
  )
  if(NOT DATAPARALLEL_CUDA_INCLUDE_DIR)
    message(
      STATUS
      "No CUDA headers: the library is built without NCCL. Install a CUDA toolkit, or pass -DDATAPARALLEL_CUDA_INCLUDE_DIR=<the folder of cusparse.h>."
    )
  endif()
endfunction()
