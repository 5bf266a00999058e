# The installed package refuses another minor version of torch than its own, and
# one without CUDA if it was built for one with it.
file(REMOVE_RECURSE ${WORK_DIR})

# configure(<version>) with a torch of that version that has no CUDA leaves
# `result` and `errors`.
macro(configure version)
  set(folder ${WORK_DIR}/${version})
  file(WRITE ${folder}/torch/TorchConfig.cmake "add_library(torch INTERFACE IMPORTED)\n")
  file(WRITE ${folder}/torch/TorchConfigVersion.cmake "set(PACKAGE_VERSION ${version})\n")
  execute_process(
    COMMAND
      ${CMAKE_COMMAND} -S ${SOURCE_DIR}/tests/consumer -B ${folder}/build -G ${GENERATOR}
      -DCMAKE_PREFIX_PATH=${BUILD_DIR}/tests/cmake/prefix -DTorch_DIR=${folder}/torch
      -DCMAKE_CXX_COMPILER=${CXX_COMPILER}
    RESULT_VARIABLE result
    ERROR_VARIABLE errors
    OUTPUT_QUIET
  )
  string(REGEX REPLACE "[ \n]+" " " errors "${errors}")
endmacro()

configure(1.99.0)
if(result EQUAL 0 OR NOT errors MATCHES "was built with torch [0-9.]+, but torch 1\\.99\\.0 was found")
  message(FATAL_ERROR "torch 1.99.0 was not refused by name: ${result} ${errors}")
endif()

configure(${TORCH_VERSION})
if(NCCL AND (result EQUAL 0 OR NOT errors MATCHES "was built for a torch with CUDA"))
  message(FATAL_ERROR "a torch without CUDA was not refused: ${result} ${errors}")
endif()
