# The installed package refuses another minor version of torch than its own.
file(REMOVE_RECURSE ${WORK_DIR})
file(WRITE ${WORK_DIR}/torch/TorchConfig.cmake "add_library(torch INTERFACE IMPORTED)\n")
file(WRITE ${WORK_DIR}/torch/TorchConfigVersion.cmake "set(PACKAGE_VERSION 1.99.0)\n")
execute_process(
  COMMAND
    ${CMAKE_COMMAND} -S ${SOURCE_DIR}/tests/consumer -B ${WORK_DIR}/build -G ${GENERATOR}
    -DCMAKE_PREFIX_PATH=${BUILD_DIR}/tests/cmake/prefix -DTorch_DIR=${WORK_DIR}/torch
    -DCMAKE_CXX_COMPILER=${CXX_COMPILER}
  RESULT_VARIABLE result
  ERROR_VARIABLE errors
)
string(REGEX REPLACE "[ \n]+" " " errors "${errors}")
if(result EQUAL 0 OR NOT errors MATCHES "was built with torch [0-9.]+, but torch 1\\.99\\.0 was found")
  message(FATAL_ERROR "torch 1.99.0 was not refused by name: ${result} ${errors}")
endif()
