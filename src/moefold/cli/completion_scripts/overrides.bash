
_moefold_overrides() {
  local key="" word="$1"
  [[ "$word" == "=" ]] && { key="${COMP_WORDS[COMP_CWORD-1]}"; word=""; }
  [[ -z "$key" && "${COMP_WORDS[COMP_CWORD-1]}" == "=" ]] && key="${COMP_WORDS[COMP_CWORD-2]}"
  case "$key" in
    "") compgen -W @KEYS@ -- "$word" ;;
@VALUES@
  esac
}
_moefold_complete() {
  _shtab_moefold
  [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *= ]] && compopt -o nospace
  return 0
}
