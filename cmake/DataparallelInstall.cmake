# Installs the libraries, their headers and the CMake package `dataparallel`.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/dataparallel)
string(REGEX MATCH "^[0-9]+\\.[0-9]+" DATAPARALLEL_TORCH_MINOR "${Torch_VERSION}")

install(
  TARGETS ${DATAPARALLEL_LIBRARIES}
  EXPORT dataparallelTargets
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
)
foreach(header IN LISTS DATAPARALLEL_PUBLIC_HEADERS)
  install(
    FILES include/dataparallel/${header}
    DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/dataparallel
  )
endforeach()
install(
  DIRECTORY ${PROJECT_BINARY_DIR}/include/dataparallel
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
)
install(
  EXPORT dataparallelTargets
  NAMESPACE dataparallel::
  DESTINATION ${package_dir}
)
configure_package_config_file(
  cmake/dataparallelConfig.cmake.in
  dataparallelConfig.cmake
  INSTALL_DESTINATION ${package_dir}
)
write_basic_package_version_file(
  dataparallelConfigVersion.cmake
  COMPATIBILITY SameMinorVersion
)
install(
  FILES
    ${CMAKE_CURRENT_BINARY_DIR}/dataparallelConfig.cmake
    ${CMAKE_CURRENT_BINARY_DIR}/dataparallelConfigVersion.cmake
    cmake/DataparallelTorch.cmake
  DESTINATION ${package_dir}
)
