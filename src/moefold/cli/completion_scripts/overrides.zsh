
_moefold_overrides() {
  if [[ "$PREFIX" == *=* ]]; then
    case "${PREFIX%%=*}" in
@VALUES@
      *) _files ;;
    esac
  else
    compadd -S '' -- @KEYS@ || _files
  fi
}
