# Installs the build tree where the other package tests look for it.
set(prefix ${BUILD_DIR}/tests/cmake/prefix)
file(REMOVE_RECURSE ${prefix})
execute_process(
  COMMAND ${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${prefix}
  COMMAND_ERROR_IS_FATAL ANY
)
